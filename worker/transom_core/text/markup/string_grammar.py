"""Makes grammars for a string that a markup writes without quotes or escapes, up to an end marker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transom_core.text.markup.lark import LarkText

_ANYTHING = r"(.|\n)*"


def string_expression(lark: LarkText, schema: Mapping[str, Any], *, end: str, without: str = "") -> str:
    """Return a grammar's expression for a string that satisfies `schema`'s `minLength`, `maxLength` and `pattern`, and for `end`.

    `end` is the marker after the string. No part of the string matches the regular expression `without`, if that is not "".
    """
    least, most, pattern = schema.get("minLength"), schema.get("maxLength"), schema.get("pattern")
    if not (least or without) and most is None and not isinstance(pattern, str):
        return lark.text_until(end)
    conditions = []
    if least or most is not None or not isinstance(pattern, str):
        conditions.append(f"/(.|\\n){{{least or 0},{'' if most is None else most}}}/")
    if isinstance(pattern, str):
        conditions.append(lark.regex(_whole_text(pattern)))
    return lark.text_of(conditions, end, without=without)


def _whole_text(pattern: str) -> str:
    """Return a regular expression that matches a whole text if `pattern` matches a part of it, as JSON schema defines `pattern`."""
    alternatives = _top_level_alternatives(pattern)
    if len(alternatives) > 1:  # an anchor belongs to one alternative only
        return f"({'|'.join(map(_whole_text, alternatives))})"
    begin = "" if pattern.startswith("^") else _ANYTHING
    has_end = pattern.endswith("$") and not pattern.endswith("\\$")
    return f"{begin}({pattern.removeprefix('^')[: -1 if has_end else None]}){'' if has_end else _ANYTHING}"


def _top_level_alternatives(pattern: str) -> list[str]:
    """Return `pattern` split at each `|` that is not inside a group or a class."""
    pieces, depth, in_class, start, at = [], 0, False, 0, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            pieces.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*pieces, pattern[start:]]

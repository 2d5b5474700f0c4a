"""`LarkText`: writes a grammar in llguidance's dialect of Lark, rule by rule.

A marker of a model's markup may be one special token, which a grammar names by its id (`<[151667]>`), or ordinary text
(`"<tool_call>"`). Free text never contains special tokens, and no token that ends an answer is allowed before a grammar's end.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transom_core.errors import RequestError
from transom_core.text.markup.context import MarkupTokenizer, ToolSpec
from transom_core.text.markup.schema_types import keyword_value
from transom_core.text.markup.string_formats import format_pattern

# Arguments are written as most chat templates write them: one space after a comma and a colon. With free whitespace, a model that
# the grammar constrains could write spaces for ever.
_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


_MAX_CHARACTERS = 1 << 20  # as `compile_grammar.MAX_GRAMMAR_BYTES`; more is not even written
_MAX_READ = 50_000  # a small schema may refer to its parts so often that to read all would take seconds
_REGEX_PIECES = re.compile(r"\\.|.", re.DOTALL)  # an escape, or a character
_ANYTHING = r"(.|\n)*"
_ASCII_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}


class LarkText:
    """A grammar under construction. Most methods return an expression, which is a part of a rule's body:

    call = lark.rule("call", f"{lark.marker('<tool_call>')} {lark.json(schema)}")    adds a rule, and returns its name
    grammar = lark.text(f"{call}+")                                                  at the end: the whole grammar
    """

    def __init__(self, tokenizer: MarkupTokenizer, *, inner_tokens: Sequence[str] = ()) -> None:
        """`inner_tokens` are parts of markers. Such a part may be a special token, for example `｜DSML｜` in `<｜DSML｜invoke`."""
        self._tokenizer = tokenizer
        self._inner_tokens = tuple(text for text in inner_tokens if tokenizer.marker_id(text) is not None)
        self._rules: list[str] = []
        self._num_names = self._num_characters = self._num_read = 0
        self._has_free_text = False

    def rule(self, hint: str, body: str, *, options: str = "") -> str:
        """Add a rule, and return its name, which begins with `hint`."""
        name = self.rule_name(hint)
        self.define(name, body, options=options)
        return name

    def rule_name(self, hint: str) -> str:
        """Return the name of a rule that `define` adds later, so that other rules, or its own body, can refer to it."""
        self._num_names += 1
        return f"{hint}_{self._num_names}"

    def define(self, name: str, body: str, *, options: str = "") -> None:
        """Add the rule of this name. Raises RequestError if the grammar gets too long."""
        self._rules.append(f"{name}{options}: {body}")
        self._num_characters += len(self._rules[-1])
        if self._num_characters > _MAX_CHARACTERS:
            raise RequestError(
                f"The grammar of the answer has more than {_MAX_CHARACTERS:,} characters; send a smaller schema."
            )

    def count_read(self, num_items: int) -> None:
        """Count schemas, keywords and listed items that are read for the grammar. Raises RequestError if they are too many."""
        self._num_read += num_items
        if self._num_read > _MAX_READ:
            raise RequestError(
                f"The tools' schemas have more than {_MAX_READ:,} keywords and listed items, each counted as often as it is "
                "referred to; send smaller ones.",
                param="tools",
            )

    def terminal(self, hint: str, body: str) -> str:
        """Add a terminal, which is one regular expression, and return its name, which begins with `hint`."""
        return self.rule(hint.upper(), body)

    def literal(self, text: str) -> str:
        """Return an expression for exactly this text, in ordinary tokens."""
        return json.dumps(text, ensure_ascii=False)

    def marker(self, text: str) -> str:
        """Return an expression for a marker: its special token, or else its text (with the special tokens of its inner tokens)."""
        before, token, after = self._parts(text)
        return " ".join([*map(self.literal, filter(None, [before])), *token, *map(self.literal, filter(None, [after]))])

    def argument_name(self) -> str:
        """Return an expression for the name of an argument that no schema names. A call may have several such arguments, and a
        grammar cannot say that their names differ: where they do not, the parser ends the call as malformed."""
        return self.terminal("name", "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/")

    def has_marker(self, text: str) -> bool:
        """Return whether the vocabulary has this marker as one token."""
        return self._tokenizer.marker_id(text) is not None

    def free_text(self) -> str:
        """Return an expression for any text, which may be empty."""
        self._has_free_text = True
        return "FREE_TEXT"

    def text_until(self, marker: str, *, without: Sequence[str] = ()) -> str:
        """Return an expression for any text up to and including the first `marker`, in which none of the texts `without` occurs.

        If the marker is a token, the text must not spell it in letters either, because a parser would take these for the marker.
        """
        lacks = [*without, *([marker] if self._parts(marker)[1] else [])]
        return self._up_to(self.text_without(lacks) if lacks else self.free_text(), marker)

    def text_of(self, conditions: Sequence[str], marker: str, *, without: str = "") -> str:
        """Return an expression for a text that matches all regular expressions `conditions`, and for the first `marker` after it.

        No part of the text matches the regular expression `without`, if that is not "".
        """
        lacks = [_lacks(escaped(marker)), *([_lacks(without)] if without else [])]
        return self._up_to(self.terminal("text", " & ".join([*conditions, *lacks])), marker)

    def text_without(self, texts: Sequence[str], *, begins: str = "") -> str:
        """Return an expression for any text that begins with a match of the regex `begins` and contains none of `texts`."""
        return self.terminal("text", " & ".join([f"/{begins}(.|\\n)*/", *map(_lacks, map(escaped, texts))]))

    def json(self, schema: Mapping[str, Any] | bool, *, escapes: str | None = None) -> str:
        """Return an expression for JSON that is valid against `schema`, with one space after commas and colons.

        `escapes` are the characters that may follow a backslash in its strings; None allows all that JSON has.
        """
        if schema is False:
            return "%json false"  # the grammar library refuses this, because nothing is valid
        settings = {"x-guidance": _WHITESPACE if escapes is None else {**_WHITESPACE, "json_allowed_escapes": escapes}}
        text = json.dumps({**schema, **settings} if isinstance(schema, Mapping) else settings)
        return self.rule("json", f"%json {text}")

    def list_of(self, item: str, *, has_several: bool) -> str:
        """Return an expression for a list in brackets: of one item, or of several if `has_several`."""
        more = f"({self.literal(', ')} {item})*" if has_several else ""
        return f"{self.literal('[')} {item} {more} {self.literal(']')}"

    def nested(self, grammar: str) -> str:
        """Return an expression for a text that matches the rule `start` of another grammar."""
        return f"%lark {{\n{grammar}\n}}"

    def regex(self, pattern: str) -> str:
        r"""Return an expression for a text that matches a regular expression; `\d` and `\w` are ASCII, as in JSON schema."""
        pieces: list[str] = []
        in_class = False
        for piece in _REGEX_PIECES.findall(pattern):
            if piece in ("[", "]"):
                in_class = piece == "["
            ascii_class = _ASCII_CLASSES.get(piece)
            if ascii_class is not None:
                piece = ascii_class if in_class else f"[{ascii_class}]"
            pieces.append({"/": "\\/", "\n": "\\n"}.get(piece, piece))
        return f"/{''.join(pieces)}/"

    def _up_to(self, text: str, marker: str) -> str:
        """Return an expression for the terminal `text`, followed by `marker`."""
        before, token, after = self._parts(marker)
        if not token:  # lazy: the rule's text ends at the first marker
            return self.rule("text_until", f"{text} {self.literal(marker)}", options="[lazy]")
        if before:  # the text before the token could be part of the free text too, so it must belong to the terminal
            text = self.terminal("text", f"{text} {self.literal(before)}")
        return " ".join([text, *token, *map(self.literal, filter(None, [after]))])

    def _parts(self, marker: str) -> tuple[str, list[str], str]:
        """Return the text before a marker's special token, the token's expression ([] if there is none), and the text after it."""
        for text in (marker, *self._inner_tokens):
            if text in marker and (token_id := self._tokenizer.marker_id(text)) is not None:
                before, _, after = marker.partition(text)
                return before, [f"<[{token_id}]>"], after
        return marker, [], ""

    def text(self, start: str) -> str:
        """Return the whole grammar, whose rule `start` has this body."""
        free = ["FREE_TEXT: /(.|\\n)*/"] if self._has_free_text else []
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, *free]) + "\n"


def arguments_schema(tool: ToolSpec) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments, which are an object even if the tool's schema does not say so."""
    return tool.parameters if "type" in tool.parameters else {**tool.parameters, "type": "object"}


def escaped(text: str) -> str:
    """Return a regular expression for exactly this text."""
    return re.sub(r"[^\w ]", lambda found: f"\\x{{{ord(found.group()):x}}}", text, flags=re.ASCII)


def string_expression(lark: LarkText, schema: Mapping[str, Any], *, end: str, without: str = "") -> str:
    """Return an expression for a string without quotes or escapes, and for `end`, the marker after it.

    The string satisfies `minLength`, `maxLength`, `pattern` and `format` of `schema`. No part of it matches the regular expression
    `without`, if that is not "".

    Raises:
        RequestError: one of these keywords is malformed, or the format is unknown.
    """
    least, most = keyword_value(schema, "minLength", int) or 0, keyword_value(schema, "maxLength", int)
    conditions = []
    if (pattern := keyword_value(schema, "pattern", str)) is not None:
        conditions.append(lark.regex(_whole_text(pattern)))
    if (name := keyword_value(schema, "format", str)) is not None:
        conditions.append(lark.regex(format_pattern(name)))
    if not (least or without or conditions) and most is None:
        return lark.text_until(end)
    return lark.text_of([f"/(.|\\n){{{least},{'' if most is None else most}}}/", *conditions], end, without=without)


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


def _lacks(pattern: str) -> str:
    """Return a regular expression for texts of which no part matches `pattern`."""
    return f"~/(?s:.*)({pattern})(?s:.*)/"

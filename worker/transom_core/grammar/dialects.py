"""Converts the grammars that clients send to llguidance's dialect of Lark: GBNF (the EBNF of llama.cpp), and structural tags.

A **structural tag** lets a model write free text in which certain beginnings start a structure. Example: with the trigger
`<function=` and the structure `{"begin": "<function=add>", "schema": {...}, "end": "</function>"}` the text is free up to
`<function=`. After it come `add>`, an object that the schema allows, and `</function>`; then the text is free again.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from transom_core.errors import RequestError

MAX_GBNF_CHARS = 32 * 2**10
MAX_GBNF_RULES = 256  # the converter's time grows with the square of their number
MAX_STRUCTURES = 256

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_FREE_TEXT = r"/(.|\n)*/"


def lark_of_grammar(text: str, *, param: str) -> str:
    """Return the Lark text of a client's grammar, which is Lark, or GBNF with rules like `root ::= "a" | "b"`.

    Raises:
        RequestError: the grammar is GBNF, and is wrong or too long; `param` is the request field that has it.
    """
    if not _GBNF_RULE.search(text):
        return text
    num_rules = text.count("::=")
    if len(text) > MAX_GBNF_CHARS or num_rules > MAX_GBNF_RULES:
        raise RequestError(
            f"{param} has {len(text):,} characters of EBNF and {num_rules:,} rules; at most {MAX_GBNF_CHARS:,} and "
            f"{MAX_GBNF_RULES} are allowed. Send a smaller grammar, or one in Lark.",
            param=param,
        )
    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise RequestError(f"{param} is nested too deeply; send a flatter grammar.", param=param) from None
    except Exception as error:  # the library raises bare Exception, and IndexError at an unexpected end
        reason = "it ends too early" if isinstance(error, IndexError) else str(error)
        raise RequestError(f"{param} is EBNF that cannot be read: {reason}.", param=param) from None


def lark_of_structural_tag(tag: Mapping[str, Any], *, marker_id: Callable[[str], int | None], param: str) -> str:
    """Return the Lark text of a structural tag: an object with `structures` and `triggers`, or with a `format` of the type
    `triggered_tags`, xgrammar's newer form of the same. A trigger that is one token is matched by that token alone.

    Raises:
        RequestError: the tag has another form; `param` is the field that has it.
    """
    given = {name: value for name, value in tag.items() if value is not None and name != "type"}
    match given:
        case {"structures": list(structures), "triggers": list(triggers), **others} if not others:
            path = f"{param}.structures"
            read = [_structure(one, f"{path}[{i}]") for i, one in enumerate(structures)]
        case {
            "format": {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **others},
            **more,
        } if not more and others.keys() <= {"excludes"} and not any(others.values()):
            path = f"{param}.format.tags"
            read = [_tag(one, f"{path}[{i}]") for i, one in enumerate(tags)]
        case _:
            raise RequestError(
                f"{param} has another form than those that are supported: structures, each with begin, schema and end, and "
                "triggers; or a format of type triggered_tags with triggers and tags.",
                param=param,
            )
    if not 0 < len(read) <= MAX_STRUCTURES:
        raise RequestError(f"{path} has {len(read)} entries; send 1 to {MAX_STRUCTURES}.", param=path)
    rules = []
    for index, (begin, schema, end) in enumerate(read):
        trigger = _trigger_of(begin, triggers, f"{path}[{index}].begin")
        rules += _rules(index, trigger, begin.removeprefix(trigger), schema, end, token_id=marker_id(trigger))
    starts = " | ".join(f"tag_{index}" for index in range(len(read)))
    return "\n".join((f"start: ({starts})* tag_end", "tag_end: TAG_TEXT", f"TAG_TEXT: {_FREE_TEXT}", *rules))


def _rules(
    index: int, trigger: str, rest: str, schema: Mapping[str, Any], end: str, *, token_id: int | None
) -> list[str]:
    """Return the rules of one structure: free text up to its trigger, and what follows the trigger."""
    name = f"tag_{index}"
    body = " ".join(part for part in (_literal(rest), f"%json {json.dumps(schema)}", _literal(end)) if part)
    if token_id is not None:
        return [f"{name}: TAG_TEXT <[{token_id}]> {body}"]
    return [f"{name}_trigger[lazy]: TAG_TEXT {_literal(trigger)}", f"{name}: {name}_trigger {body}"]


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _structure(entry: object, path: str) -> tuple[str, Mapping[str, Any], str]:
    match entry:
        case {"begin": str(begin), "schema": dict(schema), "end": str(end), **others} if begin and not others:
            return begin, schema, end
    raise RequestError(f"{path} must have begin (a text), schema (an object) and end (a text).", param=path)


def _tag(entry: object, path: str) -> tuple[str, Mapping[str, Any], str]:
    match entry:
        case {
            "begin": str(begin),
            "content": {"type": "json_schema", "json_schema": dict(schema), **more},
            "end": str(end),
            **others,
        } if begin and not more and others.keys() <= {"type"}:
            return begin, schema, end
    raise RequestError(
        f"{path} must have begin (a text), content of type json_schema with json_schema (an object), and end (a text).",
        param=path,
    )


def _trigger_of(begin: str, triggers: list[Any], path: str) -> str:
    """Return the trigger that is the first part of a structure's `begin`."""
    found = next((one for one in triggers if isinstance(one, str) and one and begin.startswith(one)), None)
    if found is None:
        raise RequestError(f"{path} is {begin[:80]!r}, which begins with none of the triggers.", param=path)
    return str(found)

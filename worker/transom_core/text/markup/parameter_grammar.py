"""Makes grammars for calls whose arguments are named texts (`<parameter=city>Paris</parameter>`) instead of one JSON object.

The arguments that `parameters` reads from such a call are valid against the tool's schema: a string argument is any text, up to its
end marker, that the schema allows, and any other argument is JSON. Arguments come in the order of the schema's properties.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transom_core.errors import RequestError
from transom_core.text.markup.lark import LarkText, string_expression
from transom_core.text.markup.object_schemas import (
    KEYWORDS_OF,
    ObjectSchema,
    listed_values,
    object_schemas,
    of_type,
    value_choices,
    with_definitions,
)
from transom_core.text.markup.parameters import quoted, typed_value
from transom_core.text.markup.schema_types import json_type, schema_types, type_names

_INTEGER = r"\s*-?(0|[1-9][0-9]*)"
_FRACTION = r"(\.[0-9]+([eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+)"
_MORE = r"([\s<](.|\n)*)?"
# JSON type -> the texts that are no strings if the schema holds values of this type to more than the type, because `parameters` may
# read them as such values. The grammar's lexer takes the longest text, so that a string may not even begin with a number and a
# character with which an end marker may begin.
_READ_AS = {
    "number": f"{_INTEGER}{_FRACTION}?{_MORE}",
    "boolean": rf"\s*([tT][rR][uU][eE]|[fF][aA][lL][sS][eE]){_MORE}",
    "array": r"\s*\[(.|\n)*",
    "object": r"\s*\{(.|\n)*",
}
_NAMES = re.compile(r"[^<>\n]*")  # names that cannot end the tag around them


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterMarkup:
    """How a family writes an argument: `before_name`, its name, `before_value`, its value, `end`, `after`.

    Example: in `<parameter=city>Paris</parameter>`, these are `<parameter=`, city, `>`, Paris, `</parameter>` and nothing.

    All are expressions of a grammar, except `end`, which is the text of the marker after a value. `before_value` returns the
    expression for a value's JSON type. Only names that match `names` can be written. The parser also takes a match of the regular
    expression `other_ends` for a value's end, so no string may contain one.
    """

    before_name: str
    before_value: Callable[[str], str]
    end: str
    after: str = ""
    names: re.Pattern[str] = _NAMES
    other_ends: str = ""


def parameter_rules(lark: LarkText, schema: Mapping[str, Any], markup: ParameterMarkup) -> str:
    """Return a grammar's expression for the arguments of one call.

    Raises:
        RequestError: as `object_schemas` does.
    """
    objects = [
        _object(lark, each.with_names(markup.names), schema, markup) for each in object_schemas(lark, schema, schema)
    ]
    return lark.rule("arguments", " | ".join(each or '""' for each in objects))


def _object(lark: LarkText, schema: ObjectSchema, root: Mapping[str, Any], markup: ParameterMarkup) -> str:
    """Return an expression for the arguments of one kind of object, in the schema's order; optional ones may be missing."""
    rules = []
    for name, value in schema.properties.items():
        rule = _argument(lark, lark.literal(name), value, root, markup)
        rules.append(rule if name in schema.required else f"{rule}?")
    if not rules and schema.additional is not False:
        rules.append(_argument(lark, lark.argument_name(), schema.additional, root, markup) + "*")
    return " ".join(rules)


def _argument(lark: LarkText, name: str, schema: Any, root: Mapping[str, Any], markup: ParameterMarkup) -> str:
    values = [f"{markup.before_value(kind)} {value}" for kind, value in _values(lark, schema, root, markup)]
    if not values:
        raise RequestError(
            "A tool lists only texts that are read as other values, such as 'true'; mend it.", param="tools"
        )
    return lark.rule("argument", f"{markup.before_name} {name} ({' | '.join(values)}) {markup.after}")


def _values(lark: LarkText, schema: Any, root: Mapping[str, Any], markup: ParameterMarkup) -> Iterator[tuple[str, str]]:
    """Yield (JSON type, expression) of the values that a schema allows; an expression includes the end marker."""
    choices = value_choices(lark, schema, root)
    says_type = markup.before_value("string") != markup.before_value("number")
    unlike = [] if says_type else _no_strings(choices, root)
    types = frozenset().union(*(schema_types(choice, root) for choice in choices))
    for choice in choices:
        listed = listed_values(choice)
        if listed is not None:
            for value in listed:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                if says_type or not isinstance(value, str) or typed_value(value, types) == quoted(value):
                    yield json_type(value), f"{lark.literal(text) if text else ''} {lark.marker(markup.end)}"
            continue
        kinds = schema_types(choice, root)
        if "string" in kinds:
            yield "string", string_expression(lark, choice, end=markup.end, without=markup.other_ends, unlike=unlike)
        for kind in sorted(kinds - {"string"}):
            yield kind, f"{lark.json(with_definitions(of_type(choice, kind), root))} {lark.marker(markup.end)}"


def _no_strings(choices: Iterable[Mapping[str, Any]], root: Mapping[str, Any]) -> list[str]:
    """Return regular expressions for texts that no string may be, because they are read as values that `choices` may forbid."""
    found: set[str] = set()
    for choice in choices:
        types = schema_types(choice, root)
        for kind in types & _READ_AS.keys():
            if not choice.keys().isdisjoint(("const", "enum", *KEYWORDS_OF.get(kind, ()))):
                found.add(_READ_AS[kind])
            elif kind == "number" and "number" not in (type_names(choice) or types):
                found.add(rf"{_INTEGER}{_FRACTION}\s*")
    return sorted(found)

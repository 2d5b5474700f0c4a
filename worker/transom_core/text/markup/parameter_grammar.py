"""Makes grammars for calls whose arguments are named texts (`<parameter=city>Paris</parameter>`) instead of one JSON object.

The arguments that `parameters` reads from such a call are valid against the tool's schema: a string argument is any text, up to its
end marker, that the schema allows, and any other argument is JSON. Arguments come in the order of the schema's properties.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transom_core.text.markup.lark import LarkText, string_expression
from transom_core.text.markup.object_schemas import (
    ObjectSchema,
    listed_values,
    object_schemas,
    of_type,
    value_choices,
    with_definitions,
)
from transom_core.text.markup.schema_types import json_type, schema_types

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
    return lark.rule("argument", f"{markup.before_name} {name} ({' | '.join(values)}) {markup.after}")


def _values(lark: LarkText, schema: Any, root: Mapping[str, Any], markup: ParameterMarkup) -> Iterator[tuple[str, str]]:
    """Yield (JSON type, expression) of the values that a schema allows; an expression includes the end marker."""
    for choice in value_choices(lark, schema, root):
        listed = listed_values(choice)
        if listed is not None:
            for value in listed:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                yield json_type(value), f"{lark.literal(text) if text else ''} {lark.marker(markup.end)}"
            continue
        types = schema_types(choice, root)
        if "string" in types:
            yield "string", string_expression(lark, choice, end=markup.end, without=markup.other_ends)
        for kind in sorted(types - {"string"}):
            yield kind, f"{lark.json(with_definitions(of_type(choice, kind), root))} {lark.marker(markup.end)}"

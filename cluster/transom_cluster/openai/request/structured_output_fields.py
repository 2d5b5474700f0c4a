"""Reads the request fields for structured output: OpenAI's `response_format`, vLLM's `structured_outputs`, and vLLM's older fields
`guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`.

A request may have at most one of them. Example: `{"structured_outputs": {"choice": ["yes", "no"]}}` and
`{"guided_choice": ["yes", "no"]}` ask for the same answer.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from msgspec import Meta, Raw

from transom_cluster.openai.request.body import LateField, WireModel, any_json
from transom_cluster.openai.request.field_rules import is_one_of
from transom_core.errors import RequestError
from transom_core.grammar.dialects import lark_of_grammar, lark_of_structural_tag
from transom_core.text.markup.context import (
    ChoiceAnswer,
    FreeAnswer,
    JsonAnswer,
    LarkAnswer,
    MessageDemand,
    RegexAnswer,
)

MAX_FORMAT_BYTES = 256 * 2**10
MAX_CHOICES = 1024

JsonObject = dict[str, Any]
FindMarker = Callable[[str], int | None]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)]


class JsonSchemaFormat(WireModel, frozen=True, kw_only=True):
    """`response_format.json_schema`. The server enforces the schema even if `strict` is false."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    schema: JsonObject | None = None  # None: any object
    strict: bool | None = None


class ResponseFormat(WireModel, frozen=True, kw_only=True):
    """`response_format`. Its last three fields belong to the type `structural_tag`, which is vLLM's."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    structures: list[Any] | None = None
    triggers: list[str] | None = None
    format: JsonObject | None = None


class StructuredOutputs(WireModel, frozen=True, kw_only=True):
    """`structured_outputs`. A request sends exactly one of the first six fields. The others are options of vLLM's back ends: this
    server ignores `disable_fallback` and accepts only the defaults of the other three."""

    json: JsonObject | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: JsonObject | str | None = None
    disable_fallback: Raw = any_json()  # ignored: there is one back end
    disable_any_whitespace: Raw = any_json()
    disable_additional_properties: Raw = any_json()
    whitespace_pattern: Raw = any_json()


_RESPONSE_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_ONLY_FALSE = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def _late(name: str, kind: Any) -> LateField[Any]:
    return LateField(name, kind, max_bytes=MAX_FORMAT_BYTES)


FIELDS: dict[str, LateField[Any]] = {
    "response_format": _late("response_format", ResponseFormat),
    "structured_outputs": _late("structured_outputs", StructuredOutputs),
    # the name without `guided_` is that of the same field in `structured_outputs`
    "guided_json": _late("guided_json", JsonObject | str),
    "guided_regex": _late("guided_regex", str),
    "guided_choice": _late("guided_choice", Choices),
    "guided_grammar": _late("guided_grammar", str),
}


def read_answer_form(texts: Mapping[str, Raw], find_marker: FindMarker) -> tuple[MessageDemand, str]:
    """Return the form that an answer's text must have, and the name of the field that asks for it, which is empty if no field does.

    `texts` has the JSON of this module's fields, by name. `find_marker` returns the token id of a marker's text if the text is a
    single token, else None; a structural tag may begin with such a token.

    Raises:
        RequestError: a field is malformed, or several fields ask for a form; `param` names the field.
    """
    demands: dict[str, MessageDemand] = {}
    for name, text in texts.items():
        value = FIELDS[name].read(text)
        demand = None if value is None else _demand(name, value, find_marker)
        if demand is not None:
            demands[name] = demand
    if len(demands) > 1:
        first, second, *_ = demands
        raise RequestError(f"{first} and {second} both ask for a form of the answer; send one of them.", param=second)
    for name, demand in demands.items():
        return demand, name
    return FreeAnswer(), ""


def _demand(name: str, value: Any, find_marker: FindMarker) -> MessageDemand | None:
    """Return the form that the field `name` asks for; None for plain text."""
    if name == "response_format":
        return None if value.type == "text" else _response_demand(value, find_marker)
    if name == "structured_outputs":
        form = _chosen_form(value)
        return _form(form, getattr(value, form), f"{name}.{form}", find_marker)
    return _form(name.removeprefix("guided_"), value, name, find_marker)


def _response_demand(given: ResponseFormat, find_marker: FindMarker) -> MessageDemand:
    match given.type:
        case "json_object":
            return JsonAnswer(schema=None)
        case "json_schema":
            if given.json_schema is None:
                path = "response_format.json_schema"
                raise RequestError(f"{path} is missing; it is required.", param=path)
            return JsonAnswer(schema=given.json_schema.schema)
        case "structural_tag":
            tag = {"structures": given.structures, "triggers": given.triggers, "format": given.format}
            return LarkAnswer(text=lark_of_structural_tag(tag, marker_id=find_marker, param="response_format"))
    path, allowed = "response_format.type", ", ".join(_RESPONSE_TYPES)
    raise RequestError(f"{path} is {given.type[:80]!r}; it must be one of {allowed}.", param=path)


def _chosen_form(given: StructuredOutputs) -> str:
    """Return the one form that `structured_outputs` has."""
    for name in _ONLY_FALSE:
        if not is_one_of(getattr(given, name), (None, False)):
            path = f"structured_outputs.{name}"
            raise RequestError(f"{path} is not supported; leave it out.", param=path)
    found = [name for name in _FORMS if getattr(given, name) is not None]
    if given.json_object is False:
        found.remove("json_object")
    if len(found) != 1:
        sent = ", ".join(found) or "none"
        raise RequestError(
            f"structured_outputs has {sent}; send exactly one of {', '.join(_FORMS)}.", param="structured_outputs"
        )
    return found[0]


def _form(name: str, value: Any, path: str, find_marker: FindMarker) -> MessageDemand:
    """Return the form `name` of `structured_outputs`, which the field `path` describes with `value`."""
    match name:
        case "json":
            return JsonAnswer(schema=_object(value, path))
        case "regex":
            return RegexAnswer(pattern=value)
        case "choice":
            return ChoiceAnswer(choices=tuple(value))
        case "grammar":
            return LarkAnswer(text=lark_of_grammar(value, param=path))
        case "json_object":
            return JsonAnswer(schema=None)
    return LarkAnswer(text=lark_of_structural_tag(_object(value, path), marker_id=find_marker, param=path))


def _object(given: JsonObject | str, path: str) -> JsonObject:
    """Return a JSON object that clients may also send as a string of JSON."""
    return given if isinstance(given, dict) else _OBJECTS[path].read(Raw(given.encode())) or {}


_OBJECTS: dict[str, LateField[JsonObject]] = {
    path: _late(path, JsonObject)
    for path in ("structured_outputs.json", "structured_outputs.structural_tag", "guided_json")
}

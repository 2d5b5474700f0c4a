"""Reads the request fields for structured output: OpenAI's `response_format`, vLLM's `structured_outputs`, and vLLM's older fields
`guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`.

A request may have at most one of them. Example: `{"structured_outputs": {"choice": ["yes", "no"]}}` and
`{"guided_choice": ["yes", "no"]}` ask for the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Raw

from transom_cluster.openai.request.body import WireModel, any_json
from transom_cluster.openai.request.field_rules import is_one_of
from transom_cluster.openai.request.late_field import LateField
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


def _late(name: str, kind: Any) -> LateField[Any]:
    return LateField(name, kind, max_bytes=MAX_FORMAT_BYTES)


RESPONSE_FORMAT: LateField[ResponseFormat] = _late("response_format", ResponseFormat)
STRUCTURED_OUTPUTS: LateField[StructuredOutputs] = _late("structured_outputs", StructuredOutputs)
GUIDED: dict[str, LateField[Any]] = {
    # field: its type; the name without `guided_` is that of the same field in `structured_outputs`
    "guided_json": _late("guided_json", JsonObject | str),
    "guided_regex": _late("guided_regex", str),
    "guided_choice": _late("guided_choice", Choices),
    "guided_grammar": _late("guided_grammar", str),
}
_RESPONSE_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_ONLY_FALSE = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """The form that an answer's text must have, and the name of the field that asks for it, which is empty if no field does."""

    demand: MessageDemand = field(default_factory=FreeAnswer)
    param: str = ""


def read_answer_form(texts: Mapping[str, Raw], find_marker: FindMarker) -> AnswerForm:
    """Return the form that a request asks for. `texts` has the JSON of this module's fields, by name. `find_marker` returns the
    token id of a marker's text if the text is a single token, else None; a structural tag may begin with such a token.

    Raises:
        RequestError: a field is malformed, or several fields ask for a form; `param` names the field.
    """
    demands: dict[str, MessageDemand] = {}
    for name, text in texts.items():
        demand = _READERS[name](text, find_marker)
        if demand is not None:
            demands[name] = demand
    if len(demands) > 1:
        first, second, *_ = demands
        raise RequestError(f"{first} and {second} both ask for a form of the answer; send one of them.", param=second)
    for name, demand in demands.items():
        return AnswerForm(demand=demand, param=name)
    return AnswerForm()


def _read_response_format(text: Raw, find_marker: FindMarker) -> MessageDemand | None:
    given = RESPONSE_FORMAT.read(text)
    if given is None or given.type == "text":
        return None
    return response_demand(given, find_marker, path="response_format")


def response_demand(given: ResponseFormat, find_marker: FindMarker, *, path: str) -> MessageDemand:
    """Return the form for a `response_format` of another type than text.

    Raises:
        RequestError: the type is unknown, or its own field is missing.
    """
    match given.type:
        case "json_object":
            return JsonAnswer(schema=None)
        case "json_schema":
            if given.json_schema is None:
                raise RequestError(f"{path}.json_schema is missing; it is required.", param=f"{path}.json_schema")
            return JsonAnswer(schema=given.json_schema.schema)
        case "structural_tag":
            tag = {"structures": given.structures, "triggers": given.triggers, "format": given.format}
            return LarkAnswer(text=lark_of_structural_tag(tag, marker_id=find_marker, param=path))
    allowed = ", ".join(_RESPONSE_TYPES)
    raise RequestError(f"{path}.type is {given.type[:80]!r}; it must be one of {allowed}.", param=f"{path}.type")


def _read_structured_outputs(text: Raw, find_marker: FindMarker) -> MessageDemand | None:
    given = STRUCTURED_OUTPUTS.read(text)
    if given is None:
        return None
    for name in _ONLY_FALSE:
        if not is_one_of(getattr(given, name), (None, False)):
            path = f"structured_outputs.{name}"
            raise RequestError(f"{path} is not supported; leave it out.", param=path)
    found = {name: value for name in _FORMS if (value := getattr(given, name)) is not None}
    if given.json_object is False:
        found.pop("json_object")
    if len(found) != 1:
        sent = ", ".join(found) or "none"
        raise RequestError(
            f"structured_outputs has {sent}; send exactly one of {', '.join(_FORMS)}.", param="structured_outputs"
        )
    ((name, value),) = found.items()
    return _FORMS[name](value, f"structured_outputs.{name}", find_marker)


def _json_answer(schema: JsonObject | str, path: str, _: FindMarker) -> MessageDemand:
    return JsonAnswer(schema=_object(schema, path))


def _structural_tag(tag: JsonObject | str, path: str, find_marker: FindMarker) -> MessageDemand:
    return LarkAnswer(text=lark_of_structural_tag(_object(tag, path), marker_id=find_marker, param=path))


def _object(given: JsonObject | str, path: str) -> JsonObject:
    """Return a JSON object that clients may also send as a string of JSON."""
    return given if isinstance(given, dict) else _OBJECTS[path].read(Raw(given.encode())) or {}


_OBJECTS: dict[str, LateField[JsonObject]] = {
    path: _late(path, JsonObject)
    for path in ("structured_outputs.json", "structured_outputs.structural_tag", "guided_json")
}
_FORMS: dict[str, Callable[[Any, str, FindMarker], MessageDemand]] = {
    "json": _json_answer,
    "regex": lambda pattern, *_: RegexAnswer(pattern=pattern),
    "choice": lambda choices, *_: ChoiceAnswer(choices=tuple(choices)),
    "grammar": lambda text, path, _: LarkAnswer(text=lark_of_grammar(text, param=path)),
    "json_object": lambda *_: JsonAnswer(schema=None),
    "structural_tag": _structural_tag,
}


def _guided_reader(name: str) -> Callable[[Raw, FindMarker], MessageDemand | None]:
    form = _FORMS[name.removeprefix("guided_")]

    def read(text: Raw, find_marker: FindMarker) -> MessageDemand | None:
        value = GUIDED[name].read(text)
        return None if value is None else form(value, name, find_marker)

    return read


_READERS: dict[str, Callable[[Raw, FindMarker], MessageDemand | None]] = {
    "response_format": _read_response_format,
    "structured_outputs": _read_structured_outputs,
    **{name: _guided_reader(name) for name in GUIDED},
}
FIELDS = tuple(_READERS)


SCHEMAS: dict[str, dict[str, Any]] = {
    # field: its schema in the OpenAPI document
    "response_format": RESPONSE_FORMAT.schema,
    "structured_outputs": STRUCTURED_OUTPUTS.schema,
    **{name: one.schema for name, one in GUIDED.items()},
}

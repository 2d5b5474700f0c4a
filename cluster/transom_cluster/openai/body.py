"""Parses a request's bytes into a checked pydantic model; every error names the field that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from transom_cluster.openai.field_rules import FieldRules
from transom_worker.errors import RequestError

Model = TypeVar("Model", bound="WireModel")


class WireModel(BaseModel):
    """Base class of request bodies. Values must have JSON's own types (no conversion from strings), and unknown fields are
    errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


def parse_body(body: bytes, model: type[Model], rules: FieldRules) -> Model:
    """Parse and check a JSON body.

    Raises:
        RequestError: the body is not a JSON object, or a field is wrong, unknown or not supported; `param` names the field.
    """
    try:
        data = from_json(body)
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}. Send a JSON object.") from None
    if not isinstance(data, dict):
        raise RequestError(f"The body is {_json_type(data)}; send a JSON object.")
    rules.check(data)
    known = {name: value for name, value in data.items() if name not in rules.ignored and name not in rules.refused}
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise _field_error(error) from None


def _field_error(error: ValidationError) -> RequestError:
    problem = _deepest(error.errors(include_url=False, include_context=False))
    path = _dotted(problem["loc"])
    if problem["type"] == "extra_forbidden":
        return RequestError(f"{path} is not a known field; leave it out.", param=path)
    if problem["type"] == "missing":
        return RequestError(f"{path} is missing; it is required.", param=path)
    message = str(problem["msg"]).removeprefix("Value error, ")
    return RequestError(f"{path} is {_shown(problem['input'])}: {message[0].lower()}{message[1:]}.", param=path)


def _deepest(problems: Sequence[Any]) -> Any:
    """The most relevant of pydantic's problems.

    For a union pydantic reports one problem per alternative. The client meant the alternative whose check got deepest into the
    value.
    """
    return max(problems, key=lambda problem: len([p for p in problem["loc"] if isinstance(p, int)]))


def _dotted(loc: Sequence[str | int]) -> str:
    """The field's path such as `messages[0].content`, without the names of union alternatives that pydantic puts into it."""
    path = str(loc[0])  # a client may have given a field any name
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float"):
            path += f".{part}"
    return path


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")

"""`LateField`: a field of a request body that stays JSON text while the body is parsed, and is parsed when its value is needed.

Lists of numbers and objects with arbitrary content are such fields: a limit on the length of their text bounds the cost of parsing.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw

from transom_cluster.openai.request.body import NULL, decode_field
from transom_cluster.openai.request.body_shape import check_depth
from transom_core.errors import RequestError

MAX_FIELD_BYTES = 64 * 2**10  # of the JSON of a field that has no other limit

Value = TypeVar("Value")


class LateField(Generic[Value]):
    """Parses the field `name` into a value of type `kind`, or None for null. Its JSON text may have at most `max_bytes`."""

    def __init__(self, name: str, kind: Any, *, max_bytes: int = MAX_FIELD_BYTES) -> None:
        self._name, self._max_bytes = name, max_bytes
        self._decoder: msgspec.json.Decoder[Value | None] = msgspec.json.Decoder(kind | None)
        self.schema = inlined_schema(kind | None)

    def read(self, text: Raw) -> Value | None:
        """Parse the field and return its value.

        Raises:
            RequestError: the value is too long, nested too deeply, or of another type.
        """
        if text == NULL:
            return None
        num_bytes = len(memoryview(text))
        if num_bytes > self._max_bytes:
            raise RequestError(
                f"{self._name} has {num_bytes:,} bytes of JSON; at most {self._max_bytes:,} are allowed.",
                param=self._name,
            )
        check_depth(bytes(text), self._name)
        return decode_field(self._decoder, text, self._name)


def inlined_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type for the OpenAPI document, without references: a field's schema cannot have any there."""
    schema = msgspec.json.schema(kind)
    definitions = schema.pop("$defs", {})

    def inlined(part: Any) -> Any:
        if isinstance(part, list):
            return [inlined(one) for one in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inlined(definitions[part["$ref"].rpartition("/")[2]])
        return {name: inlined(one) for name, one in part.items() if name != "discriminator"}  # it has references

    whole: dict[str, Any] = inlined(schema)
    return whole

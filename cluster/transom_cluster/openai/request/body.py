"""Parses the JSON body of a request into a checked struct; every error names the field that is wrong.

msgspec checks types while it parses and stops at the first error. An invalid body therefore costs no more than the part before its
first error, and the server builds no list of errors. A field that may be long, or that takes any JSON, has the type `Raw`: msgspec
keeps its JSON text, and `decode_field` parses it later. A `LateField` bounds the length of such a text, and so the cost.
"""

from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw

from transom_cluster.openai.request.body_shape import check_depth, check_shape
from transom_cluster.openai.request.field_errors import field_error
from transom_cluster.openai.request.field_rules import FieldRules
from transom_core.errors import RequestError

NULL = Raw(b"null")
MAX_FIELD_BYTES = 64 * 2**10  # of the JSON of a field that has no other limit

Model = TypeVar("Model", bound="BodyModel")
Value = TypeVar("Value")


class WireModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base class of whole bodies and of their parts. Values must have JSON's own types (no conversion from strings), and unknown
    fields are errors. `gc=False`: structs of JSON have no cycles."""


class BodyModel(WireModel, frozen=True, kw_only=True):
    """Base class of whole bodies. All may name the model, which must be the served one."""

    model: str | None = None


class OpenModel(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base class of parts in which unknown fields are ignored: clients add fields of their own to answers that they send back."""


def any_json() -> Any:
    """Declare an optional `Raw` field; its default is null."""
    return msgspec.field(default_factory=lambda: NULL)


class BodyParser(Generic[Model]):
    """Parses the bodies of one endpoint into `model`; `rules` say what happens to fields that the server does not support."""

    def __init__(self, model: type[Model], rules: FieldRules) -> None:
        self._rules = rules
        others = sorted((rules.ignored | rules.refused.keys()) - set(model.__struct_fields__))
        body_type = msgspec.defstruct(
            model.__name__,
            [(name, Raw, any_json()) for name in others],
            bases=(model,),
            frozen=True,
            kw_only=True,
            forbid_unknown_fields=True,
            gc=False,
        )
        self._decoder: msgspec.json.Decoder[Model] = msgspec.json.Decoder(body_type)
        # Error messages show a field's JSON text, so this second decoder reads every field as text.
        names = [(name, Raw, any_json()) for name in body_type.__struct_fields__]
        self._fields = msgspec.json.Decoder(msgspec.defstruct("Fields", names))

    def parse(self, body: bytes) -> Model:
        """Parse and check a JSON body.

        Raises:
            RequestError: the body is not a JSON object, it has too many strings, arrays or objects, or a field is wrong, unknown or
                not supported; `param` names the field.
        """
        check_shape(body)
        try:
            parsed = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise field_error(error, body, fields=self._fields) from None
        except (ValueError, RecursionError) as error:
            raise _malformed(error) from None
        # The rules accept a refused field whose value asks for the default behaviour.
        texts = {name: getattr(parsed, name) for name in self._rules.refused}
        self._rules.check({name: text for name, text in texts.items() if text != NULL})
        return parsed


def decode_field(decoder: msgspec.json.Decoder[Value], text: Raw | bytes, name: str) -> Value:
    """Parse the JSON text of the `Raw` field `name`.

    Raises:
        RequestError: the value is wrong; `param` names the field.
    """
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise field_error(error, text, name=name) from None
    except (ValueError, RecursionError) as error:
        raise _malformed(error, name) from None


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
    """Return a type's JSON Schema without `$ref`: in the OpenAPI document, the schema of a `Raw` field cannot refer to others."""
    schema = msgspec.json.schema(kind)
    definitions = schema.pop("$defs", {})

    def inlined(part: Any) -> Any:
        if isinstance(part, list):
            return [inlined(one) for one in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inlined(definitions[part["$ref"].rpartition("/")[2]])
        # a discriminator maps values to references
        return {name: inlined(one) for name, one in part.items() if name != "discriminator"}

    whole: dict[str, Any] = inlined(schema)
    return whole


def _malformed(error: ValueError | RecursionError, name: str | None = None) -> RequestError:
    """Return the error for invalid JSON in the field `name`, or in the whole body if there is no name."""
    reason = "it is nested deeper than the recursion limit" if isinstance(error, RecursionError) else str(error)
    if name is not None:
        return RequestError(f"{name} is not valid JSON: {reason}.", param=name)
    return RequestError(f"The body is not valid JSON: {reason}. Send a JSON object.")

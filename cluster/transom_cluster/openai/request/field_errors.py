"""Turns msgspec's error about a field into a RequestError that names the field, shows its value, and says what is allowed.

Example: msgspec says "Expected `int` >= 1 - at `$.n`", and the client gets "n is 0: expected `int` >= 1." with `param` "n".
"""

import re
from typing import Any

import msgspec
from msgspec import Raw

from transom_core.errors import RequestError

MAX_SHOWN_CHARS = 80  # of a wrong value that the error shows
MAX_QUOTED_CHARS = 1000  # of msgspec's message that stay, at its beginning and at its end
MAX_SEARCHED_BYTES = 64 * 2**10  # the error does not show a wrong value inside a longer array or object

_CHOICES = {"kv_policy.type": "full, window, adaptive or heavy"}
"""The allowed values of the fields for which msgspec's message says only that the value is invalid."""

_PATH = re.compile(r"(.*) - at `\$([^`]*)`", re.DOTALL)
_PART = re.compile(r"\.(\w+)|\[(\d+)\]")
_NO_OBJECT = re.compile(r"Expected `object`, got `(\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_ARRAY = msgspec.json.Decoder(list[Raw])
_NAMES = {"array": "an array", "str": "a string", "bool": "a boolean", "int": "a number", "float": "a number"}


def field_error(
    error: msgspec.ValidationError,
    text: Raw | bytes,
    *,
    name: str = "",
    fields: msgspec.json.Decoder[Any] | None = None,
    first_index: int = 0,
) -> RequestError:
    """Convert msgspec's `error` about the JSON `text` into the error for the client.

    `name` is the field that has this text. For the whole body `name` is empty, and `fields` decodes each known field as a text.
    `first_index` is the position of the text's first element, if the text is a part of an array.
    """
    whole = _cut(str(error))
    located = _PATH.fullmatch(whole)
    message, inside = (located[1], located[2]) if located else (whole, "")
    # msgspec writes [...] for any key of an object that is a dict; the path for the client leaves it out.
    at = re.sub(r"^\[(\d+)\]", lambda index: f"[{int(index[1]) + first_index}]", inside.replace("[...]", ""))
    path = (name + at).removeprefix(".")
    if not path and (other := _NO_OBJECT.fullmatch(message)):
        return RequestError(f"The body is {_NAMES.get(other[1], other[1])}; send a JSON object.")
    for pattern, problem in (
        (_UNKNOWN, "is not a known field; leave it out"),
        (_MISSING, "is missing; it is required"),
    ):
        if found := pattern.fullmatch(message):
            path = f"{path}.{found[1]}" if path else found[1]
            return RequestError(f"{path} {problem}.", param=path)
    if path in _CHOICES:
        message = f"{message}; it must be {_CHOICES[path]}"
    shown = _shown(text, inside, fields)
    given = f" is {shown}" if shown else ""
    return RequestError(f"{path}{given}: {message[0].lower()}{message[1:]}.", param=path)


def _cut(message: str) -> str:
    """Leave out the middle of a long message, which quotes a long name; the path at the end must stay."""
    return message if len(message) <= 2 * MAX_QUOTED_CHARS else message[:MAX_QUOTED_CHARS] + message[-MAX_QUOTED_CHARS:]


def _shown(text: Raw | bytes, path: str, fields: msgspec.json.Decoder[Any] | None) -> str:
    """Return the beginning of the JSON at `path` in `text`, or "" if the search would be slow or fails."""
    parts = _PART.findall(path)
    try:
        if fields is not None:
            text = getattr(fields.decode(text), parts.pop(0)[0])
        for field, index in parts:
            if len(memoryview(text)) > MAX_SEARCHED_BYTES:
                return ""
            text = _OBJECT.decode(text)[field] if field else _ARRAY.decode(text)[int(index)]
    # The rest is not valid JSON, or the path has `[...]` for an object's key.
    except (ValueError, LookupError, RecursionError):
        return ""
    # A character takes up to 4 bytes in UTF-8.
    shown = bytes(memoryview(text)[: 4 * MAX_SHOWN_CHARS]).decode(errors="replace")
    return shown if len(shown) <= MAX_SHOWN_CHARS else shown[: MAX_SHOWN_CHARS - 3] + "..."

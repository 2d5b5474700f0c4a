"""Turns msgspec's error about a field into a RequestError that names the field, shows its value, and says what is allowed.

Example: msgspec says "Expected `int` >= 1 - at `$.n`", and the client gets "n is 0: expected `int` >= 1." with `param` "n".
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from transom_core.errors import RequestError

MAX_SHOWN_CHARS = 80
MAX_QUOTED_CHARS = 1000
MAX_SEARCHED_BYTES = 64 * 2**10  # in a longer array or object the wrong value is not looked up

_CHOICES = {"kv_policy.type": "full, window, adaptive or heavy"}
"""What a field allows whose value msgspec only calls invalid."""

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
    """The client's form of an error about a JSON text.

    `name` is the field that has this text; for the whole body it is empty, and `fields` reads the body's known fields as texts.
    `first_index` is the position of the text's first element, if the text is a part of an array.
    """
    whole = _cut(str(error))
    located = _PATH.fullmatch(whole)
    message, inside = (located[1], located[2]) if located else (whole, "")
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
    """A message whose middle is left out where it quotes a long name: the path is at its end."""
    return message if len(message) <= 2 * MAX_QUOTED_CHARS else message[:MAX_QUOTED_CHARS] + message[-MAX_QUOTED_CHARS:]


def _shown(text: Raw | bytes, path: str, fields: msgspec.json.Decoder[Any] | None) -> str:
    """The beginning of the JSON at `path` in `text`; empty if it cannot be found at small cost."""
    parts = _PART.findall(path)
    try:
        if fields is not None:
            text = getattr(fields.decode(text), parts.pop(0)[0])
        for field, index in parts:
            if len(memoryview(text)) > MAX_SEARCHED_BYTES:
                return ""
            text = _OBJECT.decode(text)[field] if field else _ARRAY.decode(text)[int(index)]
    except (ValueError, RecursionError):  # what follows the wrong value is no JSON
        return ""
    shown = bytes(memoryview(text)[: 4 * MAX_SHOWN_CHARS]).decode(errors="replace")
    return shown if len(shown) <= MAX_SHOWN_CHARS else shown[: MAX_SHOWN_CHARS - 3] + "..."

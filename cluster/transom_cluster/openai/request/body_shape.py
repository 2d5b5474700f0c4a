"""Bounds the shape of a request's JSON before it is parsed: how many strings, and how many arrays and objects it has.

A parsed value takes up to 25 times the memory of its text (`[],` is 3 bytes and becomes a list of 64), so the limit of a body's
bytes bounds neither the memory nor the time of parsing. The counts do. Numbers are not counted: the fields that hold many of them
keep their text until it is read in pieces (`token_id_lists`).

Example: `{"a": ["x[", "\\"]"]}` has three strings and two arrays and objects. Without its strings it reads `{: [, ]}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from transom_core.errors import RequestError

SMALL_BODY_BYTES = 64 * 2**10
"""A body of up to this size is parsed on the event loop without a look at its shape: that takes 2 ms at most."""
MAX_STRINGS = 65_536  # names of fields count, too: 4,096 messages of one text part each have 32,768
MAX_CONTAINERS = 16_384  # arrays and objects
PIECE_BYTES = 128 * 2**10  # what one call reads while it holds the interpreter's lock
# Arrays and objects inside one another, in a field with any JSON; programs that walk it call themselves.
MAX_DEPTH = 100

_BRACKET = re.compile(rb"[\[\]{}]")


def check_shape(body: bytes) -> None:
    """Check that a body has no more strings, arrays and objects than a request may have.

    Raises:
        RequestError: it has more; the message has the limit.
    """
    if len(body) <= SMALL_BODY_BYTES:
        return
    num_containers = 0
    for outside in _outside_strings(body):
        num_containers += outside.count(b"[") + outside.count(b"{")
        if num_containers > MAX_CONTAINERS:
            raise RequestError(
                f"The body has more than {MAX_CONTAINERS:,} arrays and objects, which is the limit of one request; send fewer."
            )


def check_depth(text: bytes, name: str) -> None:
    """Check that the JSON of the field `name` has no more than MAX_DEPTH arrays and objects inside one another.

    Raises:
        RequestError: it has more; `param` names the field.
    """
    depth = 0
    for outside in _outside_strings(text):
        for bracket in _BRACKET.findall(outside):
            depth += 1 if bracket in b"[{" else -1
            if depth > MAX_DEPTH:
                raise RequestError(
                    f"{name} is nested deeper than {MAX_DEPTH} arrays and objects, which is the limit; send a flatter value.",
                    param=name,
                )


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """The parts of a JSON text that are outside of its strings, piece by piece."""
    num_quotes, start = 0, 0
    while start < len(body):
        piece = _next_piece(body, start)
        start += len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        is_in_string, num_quotes = num_quotes % 2, num_quotes + piece.count(b'"')
        if num_quotes > 2 * MAX_STRINGS:
            raise RequestError(
                f"The body has more than {MAX_STRINGS:,} strings, names of fields included, which is the limit of one request; "
                "send fewer."
            )
        yield b"".join(piece.split(b'"')[is_in_string::2])


def _next_piece(body: bytes, start: int) -> bytes:
    """The next PIECE_BYTES, and one byte more where they would end between a backslash and the character that it escapes."""
    piece = body[start : start + PIECE_BYTES]
    num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return body[start : start + PIECE_BYTES + num_backslashes % 2]

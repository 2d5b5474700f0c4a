"""Bounds the shape of a request's JSON before it is parsed: how many strings, and how many arrays and objects it has.

A parsed value takes more than 20 times the memory of its text: `[],` is 3 bytes and becomes a list of 64 bytes and a pointer of 8.
A limit on the bytes of a body alone would permit too much memory and time, so this module limits the counts as well. It does
not count numbers, because a field with many numbers stays text until `token_id_lists` parses it in pieces.

Example: `{"a": ["x[", "\\"]"]}` has three strings, one array and one object. The module removes the strings first, so that it
does not count brackets inside them: `{: [, ]}`.
"""

import re
from collections.abc import Iterator

from transom_core.errors import RequestError

SMALL_BODY_BYTES = 64 * 2**10
"""The server parses a body of up to this size on the event loop and does not check its shape; parsing takes 2 ms at most."""
MAX_STRINGS = 65_536  # names of fields count: 4,096 messages with one text part have 7 strings each, 28,672 in all
MAX_CONTAINERS = 16_384  # arrays and objects
PIECE_BYTES = 128 * 2**10  # what one call scans while it holds the GIL
MAX_DEPTH = 100  # nested arrays and objects in a field that takes any JSON, because recursive functions walk them

_BRACKET = re.compile(rb"[\[\]{}]")


def check_shape(body: bytes) -> None:
    """Check that a body has no more strings, arrays and objects than a request may have.

    Raises:
        RequestError: the body has more; the message names the limit.
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
    """Check that the JSON of the field `name` nests arrays and objects at most MAX_DEPTH deep.

    Raises:
        RequestError: the JSON is nested deeper; `param` names the field.
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
    """Yield the parts of a JSON text that are outside its strings, piece by piece.

    Raises:
        RequestError: the text has more than MAX_STRINGS strings.
    """
    num_quotes, start = 0, 0
    while start < len(body):
        piece = _next_piece(body, start)
        start += len(piece)
        if b"\\" in piece:  # an escaped quote does not end a string
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        is_in_string = num_quotes % 2  # 1 after an odd number of quotes: the piece begins inside a string
        num_quotes += piece.count(b'"')
        if num_quotes > 2 * MAX_STRINGS:
            raise RequestError(
                f"The body has more than {MAX_STRINGS:,} strings, names of fields included, which is the limit of one request; "
                "send fewer."
            )
        # Quotes split the piece into parts that are alternately outside and inside strings.
        yield b"".join(piece.split(b'"')[is_in_string::2])


def _next_piece(body: bytes, start: int) -> bytes:
    """Return the next PIECE_BYTES of `body`, and one byte more if the last backslash escapes the byte after them.

    Each pair of consecutive backslashes is one escaped backslash, so the last one escapes the next byte if their number is odd.
    """
    piece = body[start : start + PIECE_BYTES]
    num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return body[start : start + PIECE_BYTES + num_backslashes % 2]

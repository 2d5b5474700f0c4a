r"""Reads JSON from an answer as its characters come, checks it, and passes it on piece by piece.

Inside strings, four errors of models are corrected:

- A line end or another control character is escaped, as JSON requires.
- `\'` becomes `'`: JSON does not escape this quote.
- Half of a surrogate pair becomes U+FFFD.
- A backslash before any other character that JSON does not escape is doubled (`"\d"` becomes `"\\d"`).

Any other text that is not JSON raises `MalformedMarkupError` at the first wrong character (in a number or word: at its end).
Nesting may have any depth.
"""

import json
import re

from transom_core.text.markup.reader import SPACE, MalformedMarkupError, MarkupReader, Reading, Write

_SPACES = re.compile(f"[{SPACE}]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_CHARACTERS = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
HEX_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{4}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]..")
_SURROGATE_PAIR = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F][0-9a-fA-F]{2}")


def copy_value(reader: MarkupReader, write: Write) -> Reading[None]:
    """Read one JSON value of any kind, and write its text."""
    closers: list[str] = []  # closing brackets of the open objects and arrays, innermost last
    while True:
        yield from _copy_space(reader, write)
        first = yield from reader.peek()
        if first in "{[":
            write(reader.take(1))
            closers.append("}" if first == "{" else "]")
            yield from _copy_space(reader, write)
            if (yield from reader.peek()) != closers[-1]:
                if first == "{":
                    yield from _copy_key(reader, write)
                continue
        elif first == '"':
            yield from copy_string(reader, write)
        else:
            yield from _copy_scalar(reader, write)
        while closers:  # a value has ended
            yield from _copy_space(reader, write)
            following = yield from reader.peek()
            if following == ",":
                write(reader.take(1))
                if closers[-1] == "}":
                    yield from _copy_key(reader, write)
                break
            if following != closers[-1]:
                raise MalformedMarkupError
            write(reader.take(1))
            closers.pop()
        else:  # no bracket is open any more
            return


def copy_string(reader: MarkupReader, write: Write) -> Reading[None]:
    """Read one JSON string, and write its text with the quotes."""
    yield from reader.expect('"')
    write('"')
    while True:
        if plain := reader.take_run(_PLAIN):
            write(plain)
        following = yield from reader.peek()
        if following == '"':
            write(reader.take(1))
            return
        if following == "\\":
            yield from _copy_escape(reader, write)
        elif following < " ":
            write(json.dumps(reader.take(1))[1:-1])


def read_string(reader: MarkupReader) -> Reading[str]:
    """Read one JSON string, and return its value."""
    pieces: list[str] = []
    yield from copy_string(reader, pieces.append)
    return str(json.loads("".join(pieces)))


def _copy_escape(reader: MarkupReader, write: Write) -> Reading[None]:
    escaped = (yield from reader.need(2))[1]
    if escaped in '"\\/bfnrt':
        write(reader.take(2))
    elif escaped == "u" and HEX_ESCAPE.fullmatch((yield from reader.need(6))):
        yield from copy_code(reader, write)
    elif escaped == "'":
        reader.take(1)
        write(reader.take(1))
    else:
        reader.take(1)
        write("\\\\")


def copy_code(reader: MarkupReader, write: Write) -> Reading[None]:
    """Read an escape with four hexadecimal digits, of a surrogate pair two, and write it. Half of a pair becomes U+FFFD: clients
    cannot encode it."""
    code = reader.take(6)
    if not _SURROGATE.fullmatch(code):
        write(code)
    elif _SURROGATE_PAIR.fullmatch(code + (yield from reader.need_at_most(6))):
        write(code + reader.take(6))
    else:
        write("\\ufffd")


def _copy_scalar(reader: MarkupReader, write: Write) -> Reading[None]:
    pieces: list[str] = []
    while _SCALAR_CHARACTERS.fullmatch((yield from reader.peek())):
        pieces.append(reader.take_run(_SCALAR_CHARACTERS))
        write(pieces[-1])
    if not _SCALAR.fullmatch("".join(pieces)):
        raise MalformedMarkupError


def _copy_key(reader: MarkupReader, write: Write) -> Reading[None]:
    yield from _copy_space(reader, write)
    yield from copy_string(reader, write)
    yield from _copy_space(reader, write)
    yield from reader.expect(":")
    write(":")


def _copy_space(reader: MarkupReader, write: Write) -> Reading[None]:
    while (yield from reader.peek()) in SPACE:
        write(reader.take_run(_SPACES))

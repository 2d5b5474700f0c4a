r"""Reads Python literals as they come, and passes them on as JSON.

Example: `{'city': 'LA', 'ok': True}` becomes `{"city": "LA", "ok": true}`.

It reads strings (with all escapes except `\N{...}`), numbers, `True`, `False`, `None` and JSON's words for these, lists, tuples (as
arrays) and dicts, of any depth, with or without a trailing comma. It also reads JSON. Anything else raises `MalformedMarkupError`.
"""

import json
import re
from functools import partial

from transom_core.text.markup.json_reader import HEX_ESCAPE, copy_code
from transom_core.text.markup.reader import MalformedMarkupError, MarkupReader, Reading, Write

_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_WORD = re.compile(r"[-+.\w]*", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LONGEST_NUMBER = 4000  # digits; Python refuses to convert integers of more than 4,300 digits
_PLAIN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": "", "\\": "\\", "'": "'",
    '"': '"', "/": "/",
}  # fmt: skip
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_OCTAL = re.compile(r"[0-7]{1,3}")


def copy_literal(reader: MarkupReader, write: Write) -> Reading[None]:
    """Read one literal of any kind, and write it as JSON."""
    closers: list[str] = []  # closing brackets of the open lists, tuples and dicts, innermost last
    while True:
        yield from reader.skip_space()
        first = yield from reader.peek()
        if first in _CLOSERS:
            reader.take(1)
            write("{" if first == "{" else "[")
            closers.append(_CLOSERS[first])
            yield from reader.skip_space()
            if (yield from reader.peek()) != closers[-1]:
                if first == "{":
                    yield from _copy_key(reader, write)
                continue
        elif first in _PLAIN:
            yield from _copy_string(reader, write)
        else:
            write((yield from _read_word(reader)))
        while closers:  # a value has ended
            yield from reader.skip_space()
            has_comma = yield from reader.skip(",")
            yield from reader.skip_space()
            if (yield from reader.skip(closers[-1])):
                write("}" if closers.pop() == "}" else "]")
            elif has_comma:
                write(", ")
                if closers[-1] == "}":
                    yield from _copy_key(reader, write)
                break
            else:
                raise MalformedMarkupError
        else:  # no bracket is open any more
            return


def _copy_key(reader: MarkupReader, write: Write) -> Reading[None]:
    yield from reader.skip_space()
    if (yield from reader.peek()) in _PLAIN:
        yield from _copy_string(reader, write)
    else:
        write(json.dumps((yield from _read_word(reader))))
    yield from reader.skip_space()
    yield from reader.expect(":")
    write(": ")


def _copy_string(reader: MarkupReader, write: Write) -> Reading[None]:
    quote = yield from reader.peek()
    end = quote * 3 if (yield from reader.next_is(quote * 3)) else quote
    reader.take(len(end))
    write('"')
    while not (yield from reader.skip(end)):
        following = yield from reader.peek()
        if following == "\\":
            yield from _copy_escape(reader, write)
        else:  # a quote inside three quotes is text
            plain = reader.take(1) if following == quote else reader.take_run(_PLAIN[quote])
            write(json.dumps(plain, ensure_ascii=False)[1:-1])
    write('"')


def _copy_escape(reader: MarkupReader, write: Write) -> Reading[None]:
    """Read an escape, and write its character as JSON. As in Python, the backslash of an unknown escape is text."""
    escaped = (yield from reader.need(2))[1]
    if escaped == "u" and HEX_ESCAPE.fullmatch((yield from reader.need_at_most(6))):
        yield from copy_code(reader, write)
        return
    if escaped in _HEX_DIGITS:
        digits = (yield from reader.need(2 + _HEX_DIGITS[escaped]))[2:]
        code = _code(digits, 16)
        reader.take(2 + len(digits))
    elif escaped in "01234567":
        match = _OCTAL.match((yield from reader.need_at_most(4)), 1)
        assert match is not None
        code = int(match.group(), 8)
        reader.take(match.end())
    else:
        reader.take(2 if escaped in _ESCAPES else 1)
        write(json.dumps(_ESCAPES.get(escaped, "\\"))[1:-1])
        return
    write(json.dumps(chr(code))[1:-1])


def _code(digits: str, base: int) -> int:
    try:
        code = int(digits, base)
    except ValueError:
        raise MalformedMarkupError from None
    if code > 0x10FFFF:
        raise MalformedMarkupError
    return code


def _read_word(reader: MarkupReader) -> Reading[str]:
    """Read a number or a word, and return it as JSON."""
    word = yield from reader.run(_WORD)
    return _WORDS[word] if word in _WORDS else _number(word)


def _number(word: str) -> str:
    if _JSON_NUMBER.fullmatch(word):
        return word
    if len(word) > _LONGEST_NUMBER:
        raise MalformedMarkupError
    for convert in (partial(int, base=0), float):
        try:
            return json.dumps(convert(word), allow_nan=False)
        except ValueError:
            continue
    raise MalformedMarkupError

"""`ParameterWriter`: writes a call's arguments as a JSON object, for markup whose arguments are named texts.

Example: the texts `city` = `Paris` and `days` = `3`, with a schema in which `days` is an integer, become

    {"city": "Paris", "days": 3}

A text that can only be a string is passed on as it comes; any other text is held until it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from transom_core.text.markup.python_literals import copy_literal
from transom_core.text.markup.reader import SPACE, AnswerEnded, MalformedMarkupError, Reading, Write
from transom_core.text.markup.schema_types import JSON_TYPES, json_type, property_types
from transom_core.text.markup.tool_markup import CallReading

ReadText = Callable[[Write], Reading[object]]  # reads a text up to its end, and writes it

_WORDS = {"null": ("null",), "boolean": ("true", "false")}  # JSON type -> its values
_WORD_SPELLINGS = {"none": "null", "null": "null", "true": "true", "false": "false"}  # word in lower case -> JSON


class ParameterWriter:
    """Writes the arguments of one call."""

    def __init__(self, calls: CallReading, tool: str) -> None:
        """`tool` is the name of the tool, which need not be one of the request's."""
        self._reader = calls.reader
        self._write = calls.arguments
        self._parameters = calls.tools[tool].parameters if tool in calls.tools else {}
        self._names: set[str] = set()

    def begin(self, name: str) -> None:
        """Begin an argument. Raises MalformedMarkupError if the call already has one of this name."""
        if name in self._names:
            raise MalformedMarkupError
        self._write((", " if self._names else "{") + json.dumps(name, ensure_ascii=False) + ": ")
        self._names.add(name)

    def read_value(self, name: str, read: ReadText) -> Reading[None]:
        """Read the text of the argument `name`, and write it as a value of the type that the schema gives it.

        A text that may only be a string, null, true or false is written as it comes: its first characters decide. If it may be a
        string or something else, all of it must be known first.
        """
        types = property_types(self._parameters, name)
        if "string" not in types:
            yield from self.read_json(read, types)
        elif types <= {"string", *_WORDS}:
            yield from self._read(_TextValue(self._write, types), read)
        else:
            yield from self._read(_HeldValue(self._write, types), read)

    def read_typed(self, name: str, is_string: bool | None, read: ReadText) -> Reading[None]:
        """Begin and read the argument `name`, of which the markup says whether it is a string or JSON (None: it does not say)."""
        self.begin(name)
        if is_string:
            yield from self._read(_TextValue(self._write, frozenset()), read)
        elif is_string is None:
            yield from self.read_value(name, read)
        else:
            yield from self.read_json(read)

    def read_json(self, read: ReadText, types: frozenset[str] = JSON_TYPES) -> Reading[None]:
        """Read a text that is JSON of one of `types`. An end marker inside the strings of an object or array is text. Models
        also write objects and arrays as Python does.

        A text that is not JSON becomes a string, unless it begins like an object or an array.

        Raises:
            MalformedMarkupError: the text begins like an object or an array, but is neither JSON nor Python's.
        """
        yield from self._reader.skip_space()
        if (yield from self._reader.peek()) in "{[":
            yield from copy_literal(self._reader, self._write)
            rest: list[str] = []  # judged at the end: how much of it comes at a time depends on how the answer is cut
            yield from read(rest.append)
            if "".join(rest).strip(SPACE):
                raise MalformedMarkupError
        else:
            yield from self._read(_HeldValue(self._write, types), read)

    def end(self) -> None:
        """End the arguments."""
        self._write("}" if self._names else "{}")

    def _read(self, value: _TextValue | _HeldValue, read: ReadText) -> Reading[None]:
        try:
            yield from read(value.write)
        except AnswerEnded:
            value.give_up()
            raise
        value.end()


class _TextValue:
    """A text that is held while it may still become null, true or false (if `types` has these), and else written as a string."""

    def __init__(self, write: Write, types: frozenset[str]) -> None:
        self._write = write
        self._words = [word for name in types for word in _WORDS.get(name, ())]
        self._held: str | None = ""  # None: the text certainly is a string

    def write(self, text: str) -> None:
        """Add a piece of the text."""
        if self._held is None:
            self._write(quoted(text)[1:-1])
            return
        self._held += text
        if not any(word.startswith(self._held) for word in self._words):
            self._write(quoted(self._held)[:-1])
            self._held = None

    def end(self) -> None:
        """End the text, which is complete."""
        if self._held is None:
            self._write('"')
        else:
            self._write(self._held if self._held in self._words else quoted(self._held))

    def give_up(self) -> None:
        """Write what is held, as it is: the answer has ended inside the text, so the call is incomplete in any case."""
        self._write(self._held or "")


class _HeldValue:
    """A text that is written once it is complete."""

    def __init__(self, write: Write, types: frozenset[str]) -> None:
        self._write = write
        self._types = types
        self._pieces: list[str] = []

    def write(self, text: str) -> None:
        """Add a piece of the text."""
        self._pieces.append(text)

    def end(self) -> None:
        """End the text, which is complete."""
        self._write(typed_value("".join(self._pieces), self._types))

    def give_up(self) -> None:
        """Write what is held, as it is: the answer has ended inside the text, so the call is incomplete in any case."""
        self._write("".join(self._pieces))


def typed_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a text that stands for a value of one of `types`; a string if it can be nothing else."""
    if is_json(text, types):
        return text.strip()
    word = _WORD_SPELLINGS.get(text.strip().lower())
    if word is not None and is_json(word, types):
        return word
    return quoted(text)


def is_json(text: str, types: frozenset[str]) -> bool:
    """Return whether `text` is JSON of one of `types`."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return json_type(value) in types


def quoted(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are not JSON

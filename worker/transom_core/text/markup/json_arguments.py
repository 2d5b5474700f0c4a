"""Reads a call's arguments where the markup has them as one JSON object."""

from __future__ import annotations

from transom_core.text.markup.call_reading import CallReading
from transom_core.text.markup.json_reader import copy_value
from transom_core.text.markup.reader import MalformedMarkupError, Reading


def read_json_arguments(calls: CallReading) -> Reading[None]:
    """Read one JSON object, with space around it, as the arguments of the open call.

    Raises:
        MalformedMarkupError: it is no JSON object.
    """
    yield from calls.reader.skip_space()
    if (yield from calls.reader.peek()) != "{":
        raise MalformedMarkupError
    yield from copy_value(calls.reader, calls.arguments)
    yield from calls.reader.skip_space()

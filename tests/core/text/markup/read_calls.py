"""What answers that were read from markup must be: their calls are whole and fit their tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jsonschema

from tests.core.text.markup.canitoolcall_fixtures import call_arguments
from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.parts import AnswerPart, CallBegin, CallEnd, MalformedMarkup, MessageText


def check_calls(parts: list[AnswerPart], tools: Sequence[ToolSpec]) -> int:
    """The number of calls, all of which are complete and valid."""
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    assert [part.is_complete for part in parts if isinstance(part, CallEnd)] == [True] * len(names), parts
    assert not [part for part in parts if isinstance(part, MalformedMarkup)], parts
    for index, name in enumerate(names):
        (tool,) = [tool for tool in tools if tool.name == name]
        jsonschema.validate(json.loads(call_arguments(parts, index)), tool.parameters)
    return len(names)


def message_of(parts: list[AnswerPart]) -> str:
    """The text beside reasoning and calls."""
    return "".join(part.text for part in parts if isinstance(part, MessageText))

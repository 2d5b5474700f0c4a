"""The deltas of a streamed chat completion: one for each part of the answer, as JSON text.

    part                           delta
    ReasoningText("Rain?")         {"reasoning_content": "Rain?", "reasoning": "Rain?"}
    MessageText("Let me look.")    {"content": "Let me look."}
    CallBegin(0, "get_weather")    {"tool_calls": [{"index": 0, "id": "call_...", "type": "function",
                                                    "function": {"name": "get_weather", "arguments": ""}}]}
    CallArguments(0, '{"city":')   {"tool_calls": [{"index": 0, "function": {"arguments": "{\"city\":"}}]}

The other parts have none. Reasoning goes under two names, since clients know one or the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from transom_core.text.markup.parts import AnswerPart, CallArguments, CallBegin, MessageText, ReasoningText


def chat_deltas(parts: Iterable[AnswerPart], call_id: Callable[[int], str]) -> Iterator[str]:
    """Yield the deltas of one choice's parts; `call_id` has the id of a call by its number."""
    for part in parts:
        match part:
            case MessageText(text=text):
                yield f'{{"content":{json.dumps(text)}}}'
            case ReasoningText(text=text):
                reasoning = json.dumps(text)
                yield f'{{"reasoning_content":{reasoning},"reasoning":{reasoning}}}'
            case CallBegin(index=index, name=name):
                function = f'{{"name":{json.dumps(name)},"arguments":""}}'
                call = f'{{"index":{index},"id":"{call_id(index)}","type":"function","function":{function}}}'
                yield f'{{"tool_calls":[{call}]}}'
            case CallArguments(index=index, text=text):
                yield f'{{"tool_calls":[{{"index":{index},"function":{{"arguments":{json.dumps(text)}}}}}]}}'

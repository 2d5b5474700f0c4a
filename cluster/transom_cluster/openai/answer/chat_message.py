"""The parts of an answer in the form of a chat completion: the message of a whole one (`ChatMessage`), and a stream's deltas.

    part                           delta
    ReasoningText("Rain?")         {"reasoning_content": "Rain?", "reasoning": "Rain?"}
    MessageText("Let me look.")    {"content": "Let me look."}
    CallBegin(0, "get_weather")    {"tool_calls": [{"index": 0, "id": "call_...", "type": "function",
                                                    "function": {"name": "get_weather", "arguments": ""}}]}
    CallArguments(0, '{"city":')   {"tool_calls": [{"index": 0, "function": {"arguments": "{\"city\":"}}]}

The other parts have none. Reasoning goes under two names, since clients know one or the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from io import StringIO

from transom_cluster.openai.answer.response_types import AssistantMessage
from transom_core.text.markup.parts import AnswerPart, CallArguments, CallBegin, MessageText, ReasoningText

NUM_DIGITS = 24


def call_id(response_id: str, choice: int, call: int) -> str:
    """The id of the `call`-th call of a response's choice, both counted from 0.

    It is a digest of the response's id, which is random, and the two numbers. So it is unique, it is the same after a migration to
    another worker, and there is nothing to remember.
    """
    digest = hashlib.sha256(f"{response_id}/{choice}/{call}".encode()).hexdigest()
    return f"call_{digest[:NUM_DIGITS]}"


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


class ChatMessage:
    """The message of one choice so far."""

    def __init__(self) -> None:
        self._content = StringIO()
        self._reasoning = StringIO()
        self._calls: list[tuple[str, StringIO]] = []  # name, and the arguments' JSON text

    def add(self, parts: Iterable[AnswerPart]) -> None:
        """Add the next parts. Those of calls come in the order of their indices."""
        for part in parts:
            match part:
                case MessageText(text=text):
                    self._content.write(text)
                case ReasoningText(text=text):
                    self._reasoning.write(text)
                case CallBegin(name=name):
                    self._calls.append((name, StringIO()))
                case CallArguments(index=index, text=text):
                    self._calls[index][1].write(text)

    def body(self, call_id: Callable[[int], str]) -> AssistantMessage:
        """OpenAI's message; `call_id` has the id of a call by its number. With calls alone there is no content."""
        content = self._content.getvalue()
        reasoning = self._reasoning.getvalue()
        message: AssistantMessage = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call_id(index),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments.getvalue()},
                }
                for index, (name, arguments) in enumerate(self._calls)
            ]
        return message

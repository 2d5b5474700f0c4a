"""Converts the parts of an answer to the form of a chat completion: a whole message (`ChatMessage`), or a stream's deltas.

    part                           delta
    ReasoningText("Rain?")         {"reasoning_content": "Rain?", "reasoning": "Rain?"}
    MessageText("Let me look.")    {"content": "Let me look."}
    CallBegin(0, "get_weather")    {"tool_calls": [{"index": 0, "id": "call_...", "type": "function",
                                                    "function": {"name": "get_weather", "arguments": ""}}]}
    CallArguments(0, '{"city":')   {"tool_calls": [{"index": 0, "function": {"arguments": "{\"city\":"}}]}

Other parts make no delta. Reasoning is sent under two names, since some clients read one and some the other.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from io import StringIO

from transom_cluster.openai.answer.response_types import AssistantMessage
from transom_core.text.markup.parts import AnswerPart, CallArguments, CallBegin, MessageText, ReasoningText

NUM_DIGITS = 24  # hexadecimal digits of a call's id: 96 bits, so that ids do not collide


def call_id(response_id: str, choice: int, call: int, *, prefix: str = "call") -> str:
    """Return the id of the `call`-th call of a response's choice, both counted from 0. It begins with `prefix`.

    The id is a digest of the response's id, which is random, and of the two numbers. So it is unique and stays the same after a
    migration to another worker, and no part of the server has to store it.
    """
    digest = hashlib.sha256(f"{response_id}/{choice}/{call}".encode()).hexdigest()
    return f"{prefix}_{digest[:NUM_DIGITS]}"


def chat_deltas(parts: Iterable[AnswerPart], call_id: Callable[[int], str]) -> Iterator[str]:
    """Yield the deltas of one choice's parts as JSON; `call_id` returns the id of a call by its number."""
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
    """Collects the message of one choice."""

    def __init__(self) -> None:
        self._content = StringIO()
        self._reasoning = StringIO()
        self._calls: list[tuple[str, StringIO]] = []  # name, and the arguments' JSON text

    def add(self, parts: Iterable[AnswerPart]) -> None:
        """Add the next parts. Calls begin in the order of their indices."""
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
        """Return OpenAI's message; `call_id` returns the id of a call by its number. With calls only, its content is null."""
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

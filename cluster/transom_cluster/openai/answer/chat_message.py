"""`ChatMessage`: the parts of one choice, put together to the message of a whole chat completion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from io import StringIO

from transom_cluster.openai.answer.response_types import AssistantMessage, ToolCall
from transom_core.text.markup.parts import AnswerPart, CallArguments, CallBegin, MessageText, ReasoningText


class ChatMessage:
    """The message so far."""

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
                _tool_call(call_id(index), name, arguments.getvalue())
                for index, (name, arguments) in enumerate(self._calls)
            ]
        return message


def _tool_call(id_: str, name: str, arguments: str) -> ToolCall:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}

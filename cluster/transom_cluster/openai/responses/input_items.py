"""Reads the field `input`: the items of a conversation, which become the messages of a chat.

An **item** is a message, the model's reasoning, a tool call or a call's output. A chat's assistant message holds everything that
the model produced in one turn, so neighbouring items are joined: reasoning, a message and calls become one assistant message.

Example: `reasoning, function_call a, function_call b, function_call_output a, function_call_output b` become one assistant message
with reasoning and two calls, and two messages with the role `tool`.

`instructions`, and system or developer messages at the beginning, become one system message, since many chat templates accept only
one system message, at the beginning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from transom_cluster.openai.answer.opaque_reasoning import read_reasoning
from transom_cluster.openai.request.body import OpenModel, decode_field
from transom_cluster.openai.request.message_fields import MAX_MESSAGES
from transom_cluster.openai.responses.responses_tools import CUSTOM_INPUT, ToolName
from transom_core.errors import RequestError

_SYSTEM_ROLES = ("system", "developer")
_ROLES = ("user", "assistant", *_SYSTEM_ROLES)
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_HOSTED_ITEMS = frozenset(  # records of what OpenAI's hosted tools did; another model cannot use them
    {
        "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
        "computer_call_output", "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response",
        "tool_search_call", "tool_search_output", "compaction",
    }
)  # fmt: skip

Message = dict[str, Any]


class _ItemType(OpenModel, frozen=True, kw_only=True):
    type: str | None = None


class _Part(OpenModel, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Message(OpenModel, frozen=True, kw_only=True):
    role: str
    content: str | list[_Part]


class _Reasoning(OpenModel, frozen=True, kw_only=True):
    content: list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None


class _FunctionCall(OpenModel, frozen=True, kw_only=True):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class _CustomToolCall(OpenModel, frozen=True, kw_only=True):
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class _CallOutput(OpenModel, frozen=True, kw_only=True):
    call_id: str
    output: str | list[_Part]


_TEXT: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)
_ITEMS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
_TYPE = msgspec.json.Decoder(_ItemType)
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "message": msgspec.json.Decoder(_Message),
    "reasoning": msgspec.json.Decoder(_Reasoning),
    "function_call": msgspec.json.Decoder(_FunctionCall),
    "custom_tool_call": msgspec.json.Decoder(_CustomToolCall),
    "function_call_output": msgspec.json.Decoder(_CallOutput),
    "custom_tool_call_output": msgspec.json.Decoder(_CallOutput),
}


def read_messages(text: Raw, *, instructions: str | None, warnings: list[str]) -> list[Message]:
    """Return the chat messages of `instructions` and the field `input`, as JSON objects. Each item that is skipped adds a line to
    `warnings`.

    Raises:
        RequestError: the input is neither text nor a list of items, is empty, or an item is malformed or not supported; `param`
            names the item.
    """
    chat = _Chat(warnings)
    if instructions:
        chat.add_system(instructions)
    if bytes(memoryview(text)[:1]) == b'"':
        chat.messages.append({"role": "user", "content": decode_field(_TEXT, text, "input")})
        return chat.joined()
    items = decode_field(_ITEMS, text, "input")
    if not items:
        raise RequestError("input is an empty list; send at least one item.", param="input")
    if len(items) > MAX_MESSAGES:
        raise RequestError(
            f"input has {len(items):,} items; at most {MAX_MESSAGES:,} are allowed in one request.", param="input"
        )
    for index, item in enumerate(items):
        chat.add_item(item, f"input[{index}]")
    if not chat.messages:
        raise RequestError("input has no item that the model could read; send a message.", param="input")
    return chat.joined()


@dataclass(slots=True)
class _Chat:
    """Collects the messages of a chat. Texts with parts from several items are lists until `joined`, which copies them once."""

    warnings: list[str]
    messages: list[Message] = field(default_factory=list)

    def joined(self) -> list[Message]:
        """Return the messages, with their texts joined."""
        for message in self.messages:
            if message["role"] == "system":
                message["content"] = "\n\n".join(message["content"])
            elif "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
        return self.messages

    def add_item(self, text: Raw, path: str) -> None:
        """Add one item, or a warning that it is skipped."""
        kind = decode_field(_TYPE, text, path).type or "message"
        if kind in _HOSTED_ITEMS:
            self.warnings.append(f"{path}: items of type {kind} are skipped")
            return
        if kind not in _DECODERS:
            raise _unknown_item(kind, path)
        item = decode_field(_DECODERS[kind], text, path)
        if isinstance(item, _Message):
            self._add_message(item, path)
        elif isinstance(item, _Reasoning):
            self._add_reasoning(item, path)
        elif isinstance(item, _CallOutput):
            self.messages.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, f"{path}.output")}
            )
        elif isinstance(item, _CustomToolCall):
            self._add_call(item, msgspec.json.encode({CUSTOM_INPUT: item.input}).decode())
        else:
            self._add_call(item, item.arguments)

    def add_system(self, text: str) -> None:
        """Add a system message. If the chat is only a system message so far, the text joins that message."""
        if self.messages and self.messages[-1]["role"] == "system" and len(self.messages) == 1:
            self.messages[0]["content"].append(text)
        else:
            self.messages.append({"role": "system", "content": [text]})

    def _add_message(self, item: _Message, path: str) -> None:
        if item.role not in _ROLES:
            allowed = ", ".join(_ROLES)
            raise RequestError(f"{path}.role is {item.role[:80]!r}; it must be one of {allowed}.", param=f"{path}.role")
        text = _text(item.content, f"{path}.content")
        if item.role in _SYSTEM_ROLES:
            self.add_system(text)
        elif item.role == "user":
            self.messages.append({"role": "user", "content": text})
        else:
            turn = self._turn(_has_not_spoken)
            turn["content"] = text

    def _add_reasoning(self, item: _Reasoning, path: str) -> None:
        text = _text(item.content or [], f"{path}.content")
        if not text and item.encrypted_content:
            decoded = read_reasoning(item.encrypted_content)
            if decoded is None:
                self.warnings.append(f"{path}: encrypted_content of another server is skipped")
            text = decoded or ""
        text = text or _text(item.summary or [], f"{path}.summary")
        if text:
            self._turn(_has_not_spoken).setdefault("reasoning_content", []).append(text)

    def _add_call(self, item: _FunctionCall | _CustomToolCall, arguments: str) -> None:
        turn, tool = self._turn(lambda last: True), ToolName(name=item.name, namespace=item.namespace)
        function = {"name": tool.chat_name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})

    def _turn(self, may_join: Callable[[Message], bool]) -> Message:
        """Return the assistant message that the next part of the model's turn joins, or a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or not may_join(last):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]


def _has_not_spoken(turn: Message) -> bool:
    """Return whether an assistant message has neither content nor calls so far."""
    return "content" not in turn and "tool_calls" not in turn


def _text(content: str | Sequence[_Part], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
        elif part.type in _TEXT_PARTS and part.text is not None:
            texts.append(part.text)
        else:
            where = f"{path}[{index}]"
            raise RequestError(f"{where} has type {part.type[:80]!r}; this model takes text parts only.", param=where)
    return "".join(texts)


def _unknown_item(kind: str, path: str) -> RequestError:
    if kind == "item_reference":
        return RequestError(
            f"{path} refers to an item of an earlier response; this server stores none. Send the item itself.",
            param=path,
        )
    known = ", ".join(_DECODERS)
    return RequestError(f"{path}.type is {kind[:80]!r}; it must be one of {known}.", param=f"{path}.type")

"""Reads `system` and `messages`: messages of content blocks, which become the messages of a chat.

An assistant's blocks become one message with reasoning, text and calls; neighbouring messages of one role are joined, as Anthropic
joins them. A user's `tool_result` blocks become messages with the role `tool`. Example:

    user: tool_result a, tool_result b, text "Go on."     tool: a's result | tool: b's result | user: "Go on."

A block with `cache_control` ends a content part of the chat that has it, too; other messages have one text.

**Billing header**: coding agents begin the system prompt with the line `x-anthropic-billing-header: ...; cch=...;`, which differs
in each request. Nothing after it could be found in the prefix cache, so the model does not get this line.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Raw

from transom_cluster.openai.answer.opaque_reasoning import read_reasoning
from transom_cluster.openai.messages.request_body import (
    Content,
    Message,
    OnlyTextBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from transom_cluster.openai.request.body import decode_field

_BILLING_HEADER = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
_BETWEEN_TEXTS = {"user": "\n", "assistant": "", "system": "\n\n"}  # the model's own text was not cut at line ends
_MARK = {"type": "ephemeral"}
_MESSAGES: msgspec.json.Decoder[list[Message]] = msgspec.json.Decoder(list[Message])
_SYSTEM: msgspec.json.Decoder[str | list[OnlyTextBlock] | None] = msgspec.json.Decoder(str | list[OnlyTextBlock] | None)

ChatMessage = dict[str, Any]


def read_messages(messages: Raw, *, system: Raw, strips_billing_header: bool, warnings: list[str]) -> list[ChatMessage]:
    """Return the chat messages of the fields `system` and `messages`, as JSON objects. Each block that is skipped adds a line to
    `warnings`.

    Raises:
        RequestError: a message or a block is malformed or has a type that is not supported, such as an image; `param` names it.
    """
    chat = _Chat(warnings)
    chat.add("system", decode_field(_SYSTEM, system, "system") or [], "system")
    read = decode_field(_MESSAGES, messages, "messages")
    for index, message in enumerate(read):
        chat.add(str(message.__struct_config__.tag), message.content, f"messages[{index}].content")
    return list(chat.joined(strips_billing_header))


class _Chat:
    """Collects the messages of a chat. The texts of a message are lists until `joined`, which copies them once."""

    def __init__(self, warnings: list[str]) -> None:
        self._messages: list[ChatMessage] = []
        self._warnings = warnings

    def joined(self, strips_billing_header: bool) -> Iterator[ChatMessage]:
        """Yield the messages with their texts joined, without a system message that has no text."""
        for index, message in enumerate(self._messages):
            texts, role = message["content"], message["role"]
            if index == 0 and role == "system" and strips_billing_header:
                texts[0] = _BILLING_HEADER.sub("", texts[0])
            if role != "tool":
                message["content"] = _content(texts, message.pop("marks"), _BETWEEN_TEXTS[role])
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
            if role != "system" or any(texts):
                yield message

    def add(self, role: str, content: Content, path: str) -> None:
        """Add the blocks of one message; `path` is the field of its content."""
        for index, block in enumerate([TextBlock(text=content)] if isinstance(content, str) else content):
            match block:
                case TextBlock(text=text) | OnlyTextBlock(text=text):
                    self._turn(role)["content"].append(text)
                    self._mark(role, block)
                case ToolResultBlock():
                    self._messages.append(_result(block))
                case ToolUseBlock(id=called, name=name, input=arguments):
                    call = {"id": called, "type": "function", "function": {"name": name, "arguments": arguments}}
                    self._turn(role).setdefault("tool_calls", []).append(call)
                    self._mark(role, block)
                case ThinkingBlock(thinking=text, signature=encoded):
                    self._add_thinking(text or read_reasoning(encoded), f"{path}[{index}]")
                case RedactedThinkingBlock(data=encoded):
                    self._add_thinking(read_reasoning(encoded), f"{path}[{index}]")

    def _mark(self, role: str, block: TextBlock | OnlyTextBlock | ToolUseBlock) -> None:
        """Note after how many texts of its message a marked block ends."""
        if block.is_marked:
            turn = self._turn(role)
            turn["marks"].append(len(turn["content"]))

    def _add_thinking(self, text: str | None, path: str) -> None:
        if text:
            self._turn("assistant").setdefault("reasoning_content", []).append(text)
        elif text is None:
            self._warnings.append(f"{path}: hidden thinking of another server is skipped")

    def _turn(self, role: str) -> ChatMessage:
        """Return the message that the next block of this role joins, or a new one."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": [], "marks": []})
        return self._messages[-1]


def _content(texts: list[str], marks: list[int], between: str) -> str | list[ChatMessage]:
    """Return a message's texts as one, or as parts that end after each of the `marks`, which are numbers of texts."""
    if not marks:
        return between.join(filter(None, texts))
    parts: list[ChatMessage] = []
    text = ""
    for begin, end in pairwise((0, *marks, len(texts))):
        joined = between.join(filter(None, texts[begin:end]))
        parts.append({"type": "text", "text": between + joined if text and joined else joined})
        text += joined
    for part in parts[:-1]:
        part["cache_control"] = _MARK
    return parts if parts[-1]["text"] else parts[:-1]


def _result(block: ToolResultBlock) -> ChatMessage:
    """Return a tool's message. A failure is told in its text, because chat templates have no other place for it."""
    content = block.content or ""
    if not isinstance(content, str):
        content = "\n".join(one.text for one in content)
    shown: str | list[ChatMessage] = f"Error: {content}" if block.is_error else content
    if block.is_marked or (not isinstance(block.content, str) and any(one.is_marked for one in block.content or ())):
        shown = [{"type": "text", "text": shown, "cache_control": _MARK}]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": shown}

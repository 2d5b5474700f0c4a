"""Chat messages to prompt text, with the model's own Jinja template in a sandbox.

The helpers that templates call are the ones transformers gives them; so a template renders here as it does there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from transom_worker.errors import RequestError

# Prefixes rendered per prompt: the first message (the system part) and the latest ones. Clients come back there.
MAX_TURN_BOUNDARIES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered chat. `turn_boundaries` are token positions where a message ends, ascending."""

    text: str
    token_ids: tuple[int, ...]
    turn_boundaries: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A Jinja chat template, the special tokens it may name, and the request field to blame if it does not parse.

    Some models have another one, `tool_source`, for chats with tools.
    """

    source: str
    special_tokens: Mapping[str, str]
    tool_source: str | None = None
    param: str = "messages"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text for messages that `read_messages` has checked.

        Raises:
            RequestError: the template refuses the messages, or does not parse.
        """
        try:
            has_tools = bool(extra and extra.get("tools"))
            template = _compile(self.tool_source if has_tools and self.tool_source else self.source)
        except jinja2.TemplateError as error:
            raise RequestError(f"The chat template does not parse: {error}.", param=self.param) from None
        values = {
            **self.special_tokens,
            "tools": None,
            "documents": None,
            **(extra or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(values)
        except Exception as error:  # a template is foreign code: whatever it raises comes from these messages
            raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from None

    def render_turns(
        self, messages: Sequence[Mapping[str, Any]], *, whole: str, extra: Mapping[str, Any] | None = None
    ) -> list[str]:
        """The beginnings of `whole` after which a message ends, shortest first, at most MAX_TURN_BOUNDARIES.

        A template that writes a part of the chat differently from the whole has no boundary there.
        """
        counts = range(1, len(messages) + 1)
        texts: dict[str, None] = {}
        for count in (*counts[:1], *counts[1:][-(MAX_TURN_BOUNDARIES - 1) :]):
            try:
                text = self.render(messages[:count], add_generation_prompt=False, extra=extra)
            except RequestError:  # such as a template that insists on a user's message at the end
                continue
            if text and whole.startswith(text):
                texts[text] = None
        return sorted(texts, key=len)


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check messages and join text parts into one string.

    Raises:
        RequestError: none, or one without a role or with content that is not text.
    """
    if not messages:
        raise RequestError("messages is empty; give at least one message.", param="messages")
    return [_read_message(index, message) for index, message in enumerate(messages)]


def _read_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        _refuse(index, "has no role; give an object with role and content")
    if message.get("content") is None and message.get("tool_calls"):
        return {**message, "content": None}
    return {**message, "content": _read_content(index, message.get("content"))}


def _read_content(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        _refuse(index, f"has content of type {type(content).__name__}; give a string or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            _refuse(index, f"has a content part of type {kind!r}; supported: {{'type': 'text', 'text': '...'}}")
        texts.append(part["text"])
    return "".join(texts)


def _refuse(index: int, problem: str) -> NoReturn:
    raise RequestError(f"messages[{index}] {problem}.", param="messages")


class _GenerationTag(Extension):
    """`{% generation %}` marks what training learns from; a prompt keeps its body as it is."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

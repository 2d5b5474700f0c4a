"""Renders chat messages as prompt text with the model's Jinja chat template, in Jinja's sandbox.

Templates have the functions and filters that transformers gives them, so they render here as they do there.

**Turn boundary**: a position of the prompt at which a message ends. The prefix cache keeps window checkpoints at turn boundaries,
because the next request of a chat begins with the messages of this one.

**Cache mark**: a position up to which a client says that later requests repeat the prompt, by `cache_control` on a part of a
message. The prefix cache keeps a checkpoint there, too. A message has its marks in the field `cache_marks`, which templates do not
see: for each marked part the number of characters of `content` up to the part's end.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import product
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Name, Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from transom_core.errors import RequestError

# Boundaries per prompt: after the first message (the system prompt) and after the latest ones, because later requests branch there.
MAX_TURN_BOUNDARIES = 32
MAX_CACHE_MARKS = 4  # the latest ones of a request; Anthropic allows as many


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as token ids. A chat's prompt also has the rendered `text`, the `turn_boundaries`: the ascending token positions
    at which messages end, and the token positions of the client's `cache_marks`."""

    token_ids: tuple[int, ...]
    turn_boundaries: tuple[int, ...] = ()
    cache_marks: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A chat's text, and the ascending positions in characters at which messages end and of the client's cache marks.

    There are the ends of the first message, of the latest ones (MAX_TURN_BOUNDARIES together), and of those around cache marks.
    """

    text: str
    turn_ends: tuple[int, ...]
    cache_marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A Jinja chat template, and the special tokens that it may use.

    `tool_source` is another template for chats with tools, if the model has one. `param` is the request field that an error names
    if the template does not parse: "chat_template" for a template that came with the request.
    """

    source: str
    special_tokens: Mapping[str, str]
    tool_source: str | None = None
    param: str = "messages"

    def knows_tools(self, *, has_tools: bool) -> bool:
        """Return whether the template for chats with (or without) tools uses the variable `tools`; False if it does not parse."""
        return _names_tools(self._chosen(has_tools=has_tools))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        extra: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Render messages that `read_messages` has checked, in this process.

        A template can loop or allocate without bound, so servers call this through `TemplateRenderer`, which has limits. A message
        has no turn end if the messages up to it, rendered alone, are not the beginning of the whole chat's text.

        Raises:
            RequestError: the template refuses the messages, or does not parse.
        """
        marks = [(i, n) for i, message in enumerate(messages) for n in message.get("cache_marks", ())][
            -MAX_CACHE_MARKS:
        ]
        messages = [{key: message[key] for key in message if key != "cache_marks"} for message in messages]
        messages, text = self._first_spelling(messages, add_generation_prompt=add_generation_prompt, extra=extra)
        counts = range(1, len(messages) + 1)
        ends: set[int] = set()
        around_marks = {count for index, _ in marks for count in (index, index + 1) if count}
        for count in {*counts[:1], *counts[1:][-(MAX_TURN_BOUNDARIES - 1) :], *around_marks}:
            turns = self._beginning(messages[:count], extra)
            if turns and text.startswith(turns):
                ends.add(len(turns))
        places = {self._place_of_mark(messages, index, num_chars, text, extra) for index, num_chars in marks}
        return RenderedChat(text=text, turn_ends=tuple(sorted(ends)), cache_marks=tuple(sorted(places - {0})))

    def _first_spelling(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, extra: Mapping[str, Any] | None
    ) -> tuple[Sequence[Mapping[str, Any]], str]:
        """Return the messages in the first spelling that the template takes, and the chat's text."""
        has_calls = any(message.get("tool_calls") for message in messages)
        refusals: list[Exception] = []
        for fills_content, as_text in product((False, True), repeat=2) if has_calls else [(False, False)]:
            try:
                spelled = [_spelled(message, fills_content=fills_content, as_text=as_text) for message in messages]
                return spelled, self._render(spelled, add_generation_prompt=add_generation_prompt, extra=extra)
            except MemoryError:
                raise
            except Exception as error:  # calls may have any form
                refusals.append(error)
        raise refusals[0]

    def _beginning(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None) -> str:
        """Render a chat's first messages alone; "" if the template refuses them, for example because it requires that the last
        message is a user's."""
        try:
            return self._render(messages, add_generation_prompt=False, extra=extra)
        except RequestError:
            return ""

    def _place_of_mark(
        self,
        messages: Sequence[Mapping[str, Any]],
        index: int,
        num_chars: int,
        text: str,
        extra: Mapping[str, Any] | None,
    ) -> int:
        """Return the position in the chat's `text` of a mark after `num_chars` characters of message `index`.

        It is where the chat stops to be equal to one whose message `index` ends at the mark.
        """
        message, content = messages[index], messages[index]["content"] or ""
        if num_chars < len(content):
            message = {key: message[key] for key in message if key != "tool_calls"} | {"content": content[:num_chars]}
        cut = self._beginning([*messages[:index], message], extra)
        return bisect_left(range(1, len(cut) + 1), True, key=lambda length: not text.startswith(cut[:length]))

    def _render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, extra: Mapping[str, Any] | None
    ) -> str:
        try:
            template = _compile(self._chosen(has_tools=bool(extra and extra.get("tools"))))
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
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
        except MemoryError:
            raise
        except Exception as error:  # a template may raise any error about these messages
            raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from None

    def _chosen(self, *, has_tools: bool) -> str:
        return self.tool_source if has_tools and self.tool_source else self.source


def _spelled(message: Mapping[str, Any], *, fills_content: bool, as_text: bool) -> Mapping[str, Any]:
    """Return a message with "" as missing content, or with its calls' arguments as text."""
    spelled = dict(message)
    if as_text and message.get("tool_calls"):
        spelled["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _as_text(call["function"].get("arguments"))}}
            for call in message["tool_calls"]
        ]
    return spelled | {"content": message.get("content") or ""} if fills_content else spelled


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check messages, and join each message's text parts into one string.

    Raises:
        RequestError: there is no message, or one has no role or has content other than text.
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
    """The tag `{% generation %}`, which marks the parts of a chat that training learns from. In a prompt it has no effect."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=64)
def _names_tools(source: str) -> bool:
    """Return whether a template uses the variable `tools`."""
    try:
        return any(name.name == "tools" for name in _environment().parse(source).find_all(Name))
    except (jinja2.TemplateError, SyntaxError, RecursionError):
        return False


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        finalize=lambda value: "" if value is None else value,  # missing content, written as it is, is not the text "None"
    )  # fmt: skip
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else _tojson(arguments)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Implement transformers' filter `tojson`; Jinja's own would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

"""The request body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Raw

from transom_cluster.openai.body import NULL, WireModel, any_json
from transom_cluster.openai.field_rules import is_one_of
from transom_cluster.openai.sampling_fields import SamplingFields
from transom_cluster.openai.template_variables import TEMPLATE_VARIABLES
from transom_worker.contract import MAX_LOGPROBS, SamplingParams
from transom_worker.errors import RequestError

MAX_MESSAGES = 4096  # the chat template is rendered once for each of the last turns
MESSAGE_CHARS = 100  # the work of an empty message, as characters of text: rendering it in each of the last turns
PART_CHARS = 20
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
EXAMPLE_CHAT = [{"role": "user", "content": "Why is the sky blue?"}]


class ContentPart(WireModel, frozen=True, kw_only=True):
    """One part of a message's content. The server takes only text; the error for another kind names it."""

    type: str
    text: str | None = None
    image_url: Raw = any_json()
    input_audio: Raw = any_json()
    video_url: Raw = any_json()
    file: Raw = any_json()
    refusal: Raw = any_json()
    cache_control: Raw = any_json()  # a hint of other vendors' APIs, ignored

    @property
    def is_text(self) -> bool:
        """Whether the part is text and has no other content."""
        others = (self.image_url, self.input_audio, self.video_url, self.file, self.refusal)
        return self.type == "text" and self.text is not None and others == (NULL,) * len(others)


class ChatMessage(WireModel, frozen=True, kw_only=True):
    """One message. Fields whose only value is null are there for clients that send a response's message back unchanged."""

    role: Annotated[str, Meta(extra_json_schema={"enum": ROLES})]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Raw = any_json()
    tool_calls: Annotated[Raw, Meta(extra_json_schema={"type": ["array", "null"], "maxItems": 0})] = any_json()
    tool_call_id: str | None = None

    @property
    def num_chars(self) -> int:
        """About how much work the message makes, as characters of text: a template runs for each message, also for an empty one."""
        parts = self.content or ()
        text = len(parts) if isinstance(parts, str) else sum(PART_CHARS + len(part.text or "") for part in parts)
        return MESSAGE_CHARS + text + len(self.name or "") + len(self.refusal or "")


class ChatCompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The supported fields; docs/http_api.md lists those that are ignored or refused."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES, examples=[EXAMPLE_CHAT])]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Annotated[Raw, Meta(extra_json_schema=TEMPLATE_VARIABLES.schema)] = any_json()

    def params(self) -> SamplingParams:
        """Build the worker contract's sampling parameters.

        Raises:
            RequestError: a value is out of range or contradicts another.
        """
        self.check_stream_options()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if max_tokens is not None and max_tokens < 1:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise RequestError(f"{name} is {max_tokens}; it must be at least 1.", param=name)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(max_tokens=max_tokens, logprobs=logprobs)


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages to the form that chat templates read: role and plain text.

    A developer message becomes a system message, the role that templates know.

    Raises:
        RequestError: a message is not text, or belongs to tool calling.
    """
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, path: str) -> dict[str, Any]:
    if message.role not in ROLES:
        allowed = ", ".join(ROLES)
        raise RequestError(f"{path}.role is {message.role!r}; it must be one of {allowed}.", param=f"{path}.role")
    has_calls = not is_one_of(message.tool_calls, (None, []))
    if message.role in ("tool", "function") or has_calls or message.tool_call_id:
        field = "role" if message.role in ("tool", "function") else "tool_calls"
        raise RequestError(f"{path}.{field}: tool calls are not supported yet; send text.", param=f"{path}.{field}")
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message, path),
    }
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _text(message: ChatMessage, path: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise RequestError(f"{path}.content is missing; send a string.", param=f"{path}.content")
    for i, part in enumerate(message.content):
        if not part.is_text:
            where = f"{path}.content[{i}]"
            raise RequestError(f"{where} has type {part.type!r}; this model takes text parts only.", param=where)
    return "".join(part.text or "" for part in message.content)

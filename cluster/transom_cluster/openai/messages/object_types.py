"""The JSON bodies of /v1/messages, as typed dicts: the message, its content blocks, its usage, and errors.

Fields that only Anthropic's own service fills are null; its clients expect them.
"""

from __future__ import annotations

from typing import (
    Any,
    Literal,
    NotRequired,  # pydantic reads typing's own from Python 3.12 on only
)

from typing_extensions import TypedDict

from transom_cluster.openai.answer.response_types import KvQualityObject

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(TypedDict):
    """Token counts. The prompt has three parts: tokens that were found in the prefix cache (`cache_read_input_tokens`), tokens that
    fill whole blocks which the cache now has (`cache_creation_input_tokens`), and the rest."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: None
    output_tokens: int
    output_tokens_details: dict[str, int]
    server_tool_use: None
    service_tier: None
    inference_geo: None
    kv_quality: NotRequired[KvQualityObject]


class MessageObject(TypedDict):
    """The answer to a request. Its blocks have the types `text`, `thinking` and `tool_use`; the input of a call that was cut off is
    empty. Where the client wants thinking omitted, it is empty, and its `signature` has the text, encoded."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessagesUsage


class MessageTokensCount(TypedDict):
    """The number of tokens of a request's prompt."""

    input_tokens: int


class MessagesErrorBody(TypedDict):
    """Every error's body, and the event that ends a stream which fails. `error` has a `type` and a `message`."""

    type: Literal["error"]
    error: dict[str, str]
    request_id: str | None

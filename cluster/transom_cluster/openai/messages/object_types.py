"""The JSON bodies of /v1/messages, as typed dicts: the message, its content blocks, its usage, and errors in Anthropic's form.

Fields that only Anthropic's own service fills are null; its clients expect them.
"""

from typing import Any, Literal

from typing_extensions import TypedDict

from transom_cluster.openai.answer.error_responses import WireError
from transom_cluster.openai.answer.response_types import UsageExtensions

MESSAGES_PATH = "/v1/messages"
OVERLOADED_STATUS = 529  # Anthropic's; its clients wait and try again
_ERROR_TYPES = {  # by status; the other statuses below 500 are `invalid_request_error`, those from 500 on `api_error`
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED_STATUS: "overloaded_error",
}
_TOO_LONG = "prompt is too long: "  # agents look for these words, and shorten their conversation

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(UsageExtensions):
    """Token counts. The prompt has three parts: tokens that were found in the prefix cache (`cache_read_input_tokens`), tokens that
    fill whole blocks which the cache now has (`cache_creation_input_tokens`), and the rest (`input_tokens`)."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: None
    output_tokens: int
    output_tokens_details: dict[str, int]  # `thinking_tokens`
    server_tool_use: None
    service_tier: None
    inference_geo: None


class MessageObject(TypedDict):
    """The answer to a request. Its blocks have the types `text`, `thinking` and `tool_use`. A tool call that was cut off has an
    empty input. If the client wants thinking omitted, a thinking block has no text, and its `signature` holds the text, encoded."""

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


def is_messages_path(path: str) -> bool:
    """Return whether errors at this path have Anthropic's form."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def messages_error(error: WireError, request_id: str) -> tuple[int, MessagesErrorBody]:
    """Return the status and the body, in Anthropic's form, of an error in OpenAI's form. `request_id` may be empty."""
    status = OVERLOADED_STATUS if error.type == "overloaded_error" else error.status  # 503 in OpenAI's form
    kind = _ERROR_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    message = error.body["error"]["message"]
    if error.code == "context_length_exceeded":
        message = _TOO_LONG + message
    return status, {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id or None}

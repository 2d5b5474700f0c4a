"""Errors of /v1/messages in Anthropic's form: {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}."""

from __future__ import annotations

from transom_cluster.openai.answer.error_responses import WireError
from transom_cluster.openai.messages.object_types import MessagesErrorBody

MESSAGES_PATH = "/v1/messages"
OVERLOADED_STATUS = 529  # Anthropic's; its clients wait and try again
_TYPES = {  # the other statuses below 500 are `invalid_request_error`, those from 500 on `api_error`
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED_STATUS: "overloaded_error",
}
_TOO_LONG = "prompt is too long: "  # agents look for these words, and shorten their conversation


def is_messages_path(path: str) -> bool:
    """Return whether errors at this path have Anthropic's form."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def messages_error(error: WireError, request_id: str) -> tuple[int, MessagesErrorBody]:
    """Return the status and the body of an error; `request_id` is empty if the request has none."""
    status = OVERLOADED_STATUS if error.type == "overloaded_error" else error.status
    kind = _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    message = error.body["error"]["message"]
    if error.code == "context_length_exceeded":
        message = _TOO_LONG + message
    return status, {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id or None}

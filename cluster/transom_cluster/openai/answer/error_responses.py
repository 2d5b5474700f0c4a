"""Converts errors to the form that clients get: an HTTP status by the error's class, and OpenAI's error object:

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from transom_cluster.openai.answer.response_types import ErrorBody
from transom_core import errors

RETRY_AFTER_S = 1.0  # if the error itself has no `retry_after_s`
MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200
HIDDEN_MESSAGE = "The server failed on this request; its log has the reason. It is safe to send the request again."

_STATUS: dict[type[BaseException], tuple[int, str, str | None]] = {
    # error class: (HTTP status, OpenAI's type, code); a class without an entry gets that of its nearest base class
    errors.PromptTooLong: (400, "invalid_request_error", "context_length_exceeded"),
    errors.RequestTooLarge: (400, "invalid_request_error", "request_too_large"),
    errors.RequestError: (400, "invalid_request_error", None),
    errors.RequestTimeout: (408, "timeout_error", "request_timeout"),
    errors.Overloaded: (503, "overloaded_error", "overloaded"),
    errors.RateLimited: (429, "rate_limit_error", "rate_limit_exceeded"),
    errors.WorkerLost: (503, "server_error", "worker_unavailable"),
    errors.PoisonRequest: (500, "server_error", "poison_request"),
    errors.OutOfMemory: (503, "server_error", "out_of_memory"),
    errors.StepFailed: (500, "server_error", "step_failed"),
    Exception: (500, "server_error", "internal_error"),
}
STREAM_CODES = tuple(code for status, _, code in _STATUS.values() if code and (status == 408 or status >= 500))
"""Codes of errors that may end a stream. The server reports errors of the request itself before the stream's first byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireError:
    """An error in the form that is sent: HTTP status, OpenAI's fields, and headers."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> ErrorBody:
        """Return OpenAI's error object. Its texts are cut to a maximum length, since they may quote what the client sent."""
        message, param = _cut(self.message, MAX_MESSAGE_CHARS), self.param and _cut(self.param, MAX_PARAM_CHARS)
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def dumps(self) -> bytes:
        """Return the body as JSON."""
        return json.dumps(self.body).encode()


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


class HttpError(Exception):
    """An error of HTTP itself (unknown model, missing key, body too large) with its own status; `kind` is OpenAI's type."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.error = WireError(
            status=status, message=message, type=kind, param=param, code=code, headers=dict(headers or {})
        )


def wire_error(error: BaseException) -> WireError:
    """Return the form of `error` that the client gets. Only the log has the message of an unexpected error."""
    if isinstance(error, HttpError):
        return error.error
    kind = next(kind for kind in type(error).__mro__ if kind in _STATUS or kind is BaseException)
    status, type_, code = _STATUS.get(kind, _STATUS[Exception])
    headers = {}
    if status in (429, 503):
        retry_after_s = getattr(error, "retry_after_s", RETRY_AFTER_S)
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    message = HIDDEN_MESSAGE if status == 500 and kind is not errors.PoisonRequest else str(error)
    return WireError(
        status=status, message=message, type=type_, param=getattr(error, "param", None), code=code, headers=headers
    )

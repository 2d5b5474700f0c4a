"""Converts errors to the form that clients get: an HTTP status by the error's class, and OpenAI's error object:

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

from transom_cluster.openai.answer.response_types import ErrorBody
from transom_core import errors

RETRY_AFTER_S = 1.0
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
        """OpenAI's error object. Its texts are cut to a maximum length, since they may quote what the client sent."""
        message, param = _cut(self.message, MAX_MESSAGE_CHARS), self.param and _cut(self.param, MAX_PARAM_CHARS)
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def dumps(self) -> bytes:
        """Return the body as JSON."""
        return json.dumps(self.body).encode()


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


class HttpError(Exception):
    """An error of HTTP itself (unknown model, missing key, body too large), raised anywhere below a route."""

    def __init__(self, error: WireError) -> None:
        super().__init__(error.message)
        self.error = error


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


def unknown_model(name: str, served: str) -> HttpError:
    """Status 404 for a model that this server does not serve."""
    message = f"The model {name!r} does not exist; this server has {served!r}."
    return not_found(message, param="model", code="model_not_found")


def unknown_process(name: str) -> HttpError:
    """Status 404 for a process that is not in the cluster."""
    message = f"There is no process {name!r}; /metrics/sd lists all processes."
    return not_found(message, param="name", code="process_not_found")


def not_found(message: str, *, param: str, code: str) -> HttpError:
    """Status 404 for something that the field `param` names and that does not exist."""
    return HttpError(WireError(status=404, message=message, type="invalid_request_error", param=param, code=code))


def process_silent(name: str) -> HttpError:
    """Status 504 for a process that does not answer, although the cluster lists it or may have it."""
    message = f"The process {name!r} does not answer; try again, or look at its log."
    return HttpError(WireError(status=504, message=message, type="server_error", param="name", code="process_silent"))


def body_too_large(max_body_bytes: int) -> HttpError:
    """Status 413; the message has the limit."""
    message = f"The request body is larger than {max_body_bytes:,} bytes; send less, or raise --max-body-bytes."
    return HttpError(
        WireError(status=413, message=message, type="invalid_request_error", code="request_body_too_large")
    )


def body_too_slow(body_timeout_s: float) -> HttpError:
    """Status 408. The connection is closed: it cannot carry another request, since the rest of the body may still come."""
    message = (
        f"The request body was not complete after {body_timeout_s:g} s; send it faster, or raise --body-timeout-s."
    )
    return HttpError(
        WireError(
            status=408, message=message, type="timeout_error", code="request_timeout", headers={"connection": "close"}
        )
    )


def headers_too_large(max_header_bytes: int) -> WireError:
    """Status 431; the message has the limit."""
    return WireError(
        status=431,
        message=f"The request's headers are larger than {max_header_bytes:,} bytes; send less, or raise --max-header-bytes.",
        type="invalid_request_error",
        code="request_headers_too_large",
    )


def wrong_api_key(*, missing: bool) -> WireError:
    """Status 401 for a missing or wrong key."""
    reason = "No API key was given" if missing else "The API key is wrong"
    return WireError(
        status=401,
        message=f"{reason}; send a valid one as 'Authorization: Bearer KEY'.",
        type="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def admin_key_required() -> WireError:
    """Status 403 for a client's key on a route that needs an admin key."""
    return WireError(
        status=403,
        message="This route shows data of all clients together; send a key from --admin-api-key-file.",
        type="permission_error",
        code="admin_api_key_required",
    )


def http_status_error(status: int, method: str, path: str) -> WireError:
    """Return the client's form of an error that FastAPI itself raises: for an unknown path or a wrong method."""
    if status == 404:
        message, code = f"There is no route {path}; GET / lists all paths.", "not_found"
    elif status == 405:
        message, code = f"{method} is not allowed at {path}.", "method_not_allowed"
    else:
        message, code = f"The request was refused with status {status}.", None
    return WireError(status=status, message=message, type="invalid_request_error", code=code)

"""Every error as clients see it: one map from error class to status, and OpenAI's error object.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

from transom_cluster.openai.response_types import ErrorBody
from transom_worker import errors
from transom_worker.contract import ErrorInfo

RETRY_AFTER_S = 1.0
MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200
HIDDEN_MESSAGE = "The server failed on this request; its log has the reason. It is safe to send the request again."

_STATUS: dict[type[BaseException], tuple[int, str, str | None]] = {
    # error class: (HTTP status, OpenAI's type, code); the nearest class in the error's own tree counts
    errors.PromptTooLong: (400, "invalid_request_error", "context_length_exceeded"),
    errors.RequestTooLarge: (400, "invalid_request_error", "request_too_large"),
    errors.RequestError: (400, "invalid_request_error", None),
    errors.RequestTimeout: (408, "timeout_error", "request_timeout"),
    errors.Overloaded: (503, "overloaded_error", "overloaded"),
    errors.RateLimited: (429, "rate_limit_error", "rate_limit_exceeded"),
    errors.WorkerLost: (503, "server_error", "worker_unavailable"),
    errors.PoisonRequest: (500, "server_error", "poison_request"),
    errors.StepFailed: (500, "server_error", "step_failed"),
    Exception: (500, "server_error", "internal_error"),
}
STREAM_CODES = tuple(code for status, _, code in _STATUS.values() if code and (status == 408 or status >= 500))
"""Codes of what may end an answer that has begun; what is wrong with a request shows before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireError:
    """An error ready to be sent: status, OpenAI's fields, and headers."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> ErrorBody:
        """OpenAI's error object. What a client sent is quoted briefly at most."""
        message, param = _cut(self.message, MAX_MESSAGE_CHARS), self.param and _cut(self.param, MAX_PARAM_CHARS)
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def dumps(self) -> bytes:
        """The body as JSON."""
        return json.dumps(self.body).encode()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


class HttpError(Exception):
    """An error of HTTP itself (unknown model, missing key, body too large), raised anywhere below a route."""

    def __init__(self, error: WireError) -> None:
        super().__init__(error.message)
        self.error = error


def wire_error(error: BaseException) -> WireError:
    """What a client is told about `error`. Whatever is not in Transom's tree keeps its message for the log."""
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


def wire_error_from_info(info: ErrorInfo) -> WireError:
    """The same for an error that came from a worker."""
    return wire_error(info.error())


def unknown_model(name: str, served: str) -> HttpError:
    """404 for a model that is not served here."""
    message = f"The model {name!r} does not exist; this server has {served!r}."
    return not_found(message, param="model", code="model_not_found")


def unknown_process(name: str) -> HttpError:
    """404 for a process that is not in the cluster."""
    message = f"There is no process {name!r}; /metrics/sd names those that there are."
    return not_found(message, param="name", code="process_not_found")


def not_found(message: str, *, param: str, code: str) -> HttpError:
    """404 for what a parameter names and is not there."""
    return HttpError(WireError(status=404, message=message, type="invalid_request_error", param=param, code=code))


def process_silent(name: str) -> HttpError:
    """504 for a process that is there, or may be, and does not answer."""
    message = f"The process {name!r} does not answer; try again, or look at its log."
    return HttpError(WireError(status=504, message=message, type="server_error", param="name", code="process_silent"))


def body_too_large(max_body_bytes: int) -> HttpError:
    """413; the limit is in the message."""
    message = f"The request body is larger than {max_body_bytes:,} bytes; send less, or raise --max-body-bytes."
    return HttpError(
        WireError(status=413, message=message, type="invalid_request_error", code="request_body_too_large")
    )


def headers_too_large(max_header_bytes: int) -> WireError:
    """431; the limit is in the message."""
    return WireError(
        status=431,
        message=f"The request's headers are larger than {max_header_bytes:,} bytes; send less, or raise --max-header-bytes.",
        type="invalid_request_error",
        code="request_headers_too_large",
    )


def wrong_api_key(*, missing: bool) -> WireError:
    """401."""
    reason = "No API key was given" if missing else "The API key is wrong"
    return WireError(
        status=401,
        message=f"{reason}; send a valid one as 'Authorization: Bearer KEY'.",
        type="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def not_an_admin() -> WireError:
    """403 for a client's key where an admin's is wanted."""
    return WireError(
        status=403,
        message="This shows what all clients do together, which a client's key does not open; send one of --admin-api-key-file.",
        type="permission_error",
        code="admin_api_key_required",
    )


def http_status_error(status: int, method: str, path: str) -> WireError:
    """For what the web framework refuses by itself: unknown paths, wrong methods."""
    if status == 404:
        message, code = f"There is nothing at {path}; GET / lists what there is.", "not_found"
    elif status == 405:
        message, code = f"{method} is not allowed at {path}.", "method_not_allowed"
    else:
        message, code = f"The request was refused with status {status}.", None
    return WireError(status=status, message=message, type="invalid_request_error", code=code)

"""What came of an HTTP request, also where the status that was sent does not tell: an answer that broke off had begun with 200."""

from __future__ import annotations

from starlette.types import Message, Scope

from transom_cluster.openai.errors import STREAM_CODES, WireError

CLIENT_LEFT = 499  # nobody is sent this status; access logs of proxies have made it known
LEFT = "client_left"
REFUSED = "request_refused"  # whatever is the request's own fault, found late
BREAK_REASONS = (*STREAM_CODES, REFUSED, LEFT)
"""Why an answer may end before its last byte: the codes of the errors that a stream may have, and who left."""


def broke_off(scope: Scope, error: WireError) -> None:
    """An answer that had begun ends with this error."""
    scope.setdefault("state", {})["broke_off"] = error


def is_endless(scope: Scope) -> None:
    """The response goes on until its client leaves, which is then its end."""
    scope.setdefault("state", {})["endless"] = True


class Outcome:
    """One request's: fed with the messages of its response once they are sent, asked when nothing more is done for it."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._sent_status: int | None = None
        self._is_whole = False

    def begins(self, message: Message) -> None:
        """This message is about to be sent."""
        if message["type"] == "http.response.start":
            self._sent_status = message["status"]

    def is_sent(self, message: Message) -> None:
        """It has been."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_whole = True

    @property
    def status(self) -> int:
        """The one that was sent; that of the error where the answer broke off; 499 where the client left first."""
        if self._error is not None:
            return self._error.status
        return CLIENT_LEFT if self._sent_status is None or self._was_left else self._sent_status

    @property
    def break_reason(self) -> str | None:
        """Why the answer broke off after its first byte, one of `BREAK_REASONS`; None where it did not."""
        if self._error is not None:
            return self._error.code if self._error.code in STREAM_CODES else REFUSED
        return LEFT if self._was_left else None

    @property
    def _was_left(self) -> bool:
        """Whether the client left in the middle of the answer."""
        return self._sent_status is not None and not self._is_whole and not self._scope["state"].get("endless", False)

    @property
    def _error(self) -> WireError | None:
        error: WireError | None = self._scope.get("state", {}).get("broke_off")
        return error

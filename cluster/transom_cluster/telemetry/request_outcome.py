"""Records how one HTTP request ended, even if the status code that was sent does not show it.

A streamed response sends 200 before its first byte. If the worker then fails, or the client disconnects, the request has failed
although 200 was sent. Metrics count such a request with the status of its error, or with 499 for a client that disconnected.

Broken response: a response that ended after its first byte and before its last.
"""

from starlette.types import Message

from transom_cluster.openai.answer.error_responses import STREAM_CODES, WireError

CLIENT_DISCONNECTED_STATUS = 499  # never sent; nginx's access log uses the same number
CLIENT_DISCONNECTED = "client_left"
REQUEST_REFUSED = "request_refused"  # an error of the request itself, found only after the first byte
BREAK_REASONS = (*STREAM_CODES, REQUEST_REFUSED, CLIENT_DISCONNECTED)
"""Why a response may break: the codes of errors that may end a stream, an error of the request itself, or a client that
disconnected."""


class RequestOutcome:
    """The outcome of one request. The middleware feeds it with the response's messages, and reads it once the request has ended."""

    __slots__ = ("_error", "_is_complete", "_is_endless", "has_begun", "sent_status")

    def __init__(self) -> None:
        self.has_begun = False
        self.sent_status = CLIENT_DISCONNECTED_STATUS  # until the response begins
        self._is_complete = False
        self._is_endless = False
        self._error: WireError | None = None

    def message_sending(self, message: Message) -> None:
        """Note a message of the response before it is sent."""
        if message["type"] == "http.response.start":
            self.has_begun, self.sent_status = True, message["status"]

    def message_sent(self, message: Message) -> None:
        """Note a message of the response after it was sent."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_complete = True

    def break_with(self, error: WireError) -> None:
        """Note that the response has begun and ends with `error`."""
        self._error = error

    def mark_endless(self) -> None:
        """Note that the response is endless, so that it counts as complete when the client disconnects."""
        self._is_endless = True

    @property
    def status(self) -> int:
        """Return the status that metrics count.

        For a broken response it is the error's status, for a client that disconnected 499, and otherwise the status that was sent.
        """
        if self._error is not None:
            return self._error.status
        return CLIENT_DISCONNECTED_STATUS if self._client_disconnected else self.sent_status

    @property
    def break_reason(self) -> str | None:
        """Return why the response broke, one of `BREAK_REASONS`; None if it did not break."""
        if self._error is not None:
            return self._error.code if self._error.code in STREAM_CODES else REQUEST_REFUSED
        return CLIENT_DISCONNECTED if self._client_disconnected else None

    @property
    def _client_disconnected(self) -> bool:
        """Return whether the client disconnected after the response's first byte and before its last."""
        return self.has_begun and not self._is_complete and not self._is_endless

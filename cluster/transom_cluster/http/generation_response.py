"""`GenerationResponse`: the HTTP response of one generation, as one JSON body or as a stream of server-sent events.

The response runs its engine requests while it is being sent, and aborts them as soon as the client disconnects.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from transom_cluster.http.client_disconnect import until_disconnect
from transom_cluster.http.client_limits import WorkLimits
from transom_cluster.http.request_state import RequestState
from transom_cluster.openai.answer.error_responses import STREAM_CODES, WireError, wire_error
from transom_cluster.openai.answer.json_pieces import PIECE_CHARS, joined_pieces, json_pieces
from transom_cluster.openai.answer.writers import ResponseWriter
from transom_cluster.router.output_stream import OutputStream
from transom_cluster.router.router import Router
from transom_cluster.telemetry.request_events import ClientLeft, RequestEvents
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_cluster.telemetry.tracebacks import traceback_lines
from transom_core.contract import OutputEvent, Request
from transom_core.errors import Overloaded, RequestError, WorkerLost

logger = logging.getLogger("transom.router")

MANY_TOKENS = 256  # an event with this many tokens takes milliseconds to parse; after it, other requests get a turn
OTHERS_TURN = ""  # an empty piece of a stream: before the next piece, other requests get a turn on the event loop

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells reverse proxies not to buffer tokens
]


class GenerationResponse(Response):
    """Runs the engine requests when it is sent, so that no code path before the last byte can leave one running.

    A stream's headers are sent with its first output event, so that an error before that event still gets its own status code.
    `headers` are sent in addition to the usual ones.
    """

    def __init__(
        self,
        router: Router,
        requests: Sequence[Request],
        writer: ResponseWriter,
        *,
        state: RequestState,
        work: WorkLimits,
        stream: bool,
        events: RequestEvents,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._more_headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self._work = work
        self._client, self._outcome = state.counted_as, state.outcome
        self._events = events
        self._router = router
        self._requests = requests
        self._writer = writer
        self._stream = stream
        self._metrics = ResponseMetrics(router.metrics, requests)
        self._has_output = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the requests and send their output; abort them if the client disconnects first."""
        await until_disconnect(self._run(send), receive, on_disconnect=lambda: self._events.report(ClientLeft()))

    async def _run(self, send: Send) -> None:
        with self._work.response(self._client, self._requests):
            try:
                await self._generate(send)
            except (Overloaded, RequestError, WorkerLost):
                # Of several choices, one may have been computed while another was refused.
                if len(self._requests) == 1 and not self._has_output:
                    self._work.give_back(self._client, self._requests)
                raise

    async def _generate(self, send: Send) -> None:
        async with self._router.generate(self._requests, self._events) as output:
            self._metrics.requests_submitted()
            try:
                if self._stream:
                    await self._send_stream(output, send)
                else:
                    await self._collect(output)
                    self._writer.identity = output.identity or ""
                    await self._send_body(send)
            finally:
                self._router.metrics.answers.answered(self._writer.readers)

    async def _collect(self, output: OutputStream) -> None:
        """Wait for all events and give them to the writer. Raises the error of a choice that fails."""
        while output.num_unfinished:
            for index, event in await output.next():
                if event.error is not None:
                    raise event.error.error()
                self._writer.add(index, self._shown_event(index, event))
                if len(event.token_ids) >= MANY_TOKENS:
                    await asyncio.sleep(0)

    async def _send_body(self, send: Send) -> None:
        """Send the whole response. A large one is sent in pieces, and other requests get a turn between two pieces."""
        pieces = (piece.encode() for piece in joined_pieces(json_pieces(self._writer.body())))
        piece, following = next(pieces), next(pieces, None)
        headers = [(b"content-type", b"application/json"), *self._more_headers]
        if following is None:
            headers.append((b"content-length", b"%d" % len(piece)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while following is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
            piece, following = following, next(pieces, None)
        await send({"type": "http.response.body", "body": piece, "more_body": False})

    async def _send_stream(self, output: OutputStream, send: Send) -> None:
        first = await output.next()
        for _, event in first:
            if event.error is not None:
                raise event.error.error()
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS + self._more_headers})
        self._writer.identity = output.identity or ""
        self._router.metrics.open_streams.inc()
        try:
            await self._send_chunks(output, first, send)
        finally:
            self._router.metrics.open_streams.dec()

    async def _send_chunks(self, output: OutputStream, events: list[tuple[int, OutputEvent]], send: Send) -> None:
        """Send chunks until the stream ends. Events that arrive during a send go out in the next one, unless they are large."""
        while True:
            text, ended = "", output.num_unfinished == 0
            for piece in self._chunks(events, is_last=ended):
                if isinstance(piece, WireError):  # status 200 was sent already, so the stream itself carries the error
                    self._outcome.break_with(piece)
                    ended = True
                    continue
                text += piece
                if piece == OTHERS_TURN:
                    await asyncio.sleep(0)
                if len(text) >= PIECE_CHARS:
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                    await asyncio.sleep(0)
                    text = ""
            if text or ended:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": not ended})
            if ended:
                return
            events = await output.next()

    def _chunks(self, events: list[tuple[int, OutputEvent]], *, is_last: bool) -> Iterator[str | WireError]:
        """Yield the server-sent events for these output events and, if they are the last, those that close the stream.

        If the stream fails, yield the error before the server-sent events that report it."""
        for index, event in events:
            error: WireError | None = None
            if event.error is not None:
                error = wire_error(event.error.error())
                if error.code in STREAM_CODES:
                    self._log_break(f"{event.error.kind}, {error.code}")
            else:
                try:
                    yield from self._writer.chunks(index, self._shown_event(index, event))
                    if len(event.token_ids) >= MANY_TOKENS:
                        yield OTHERS_TURN
                except Exception as bug:
                    self._log_break("".join(traceback_lines(bug, with_messages=self._router.config.log_prompts)))
                    error = wire_error(bug)
            if error is not None:
                yield error
                yield from self._writer.stream_error(error)
                return
        if is_last:
            yield from self._writer.stream_end()

    def _log_break(self, reason: str) -> None:
        """Log an error that is not the request's own fault. The access log does not show it, since the status was 200."""
        request_id = self._requests[0].request_id
        logger.error("The stream of %s broke off: %s", request_id, reason, extra={"request_id": request_id})

    def _shown_event(self, index: int, event: OutputEvent) -> OutputEvent:
        """Return the part of an event that the client gets; count the event in metrics and usage, and charge for its tokens."""
        self._has_output = True
        self._metrics.event_received(index, event)
        self._work.tokens.charge(self._client, len(event.token_ids))
        event = self._writer.shown_event(event)
        self._metrics.event_sent(event)
        self._writer.usage.add(index, event)
        return event


class ResponseMetrics:
    """Measures each choice's time to first token and inter-token latency, and counts tokens as `usage` does."""

    def __init__(self, metrics: RouterMetrics, requests: Sequence[Request]) -> None:
        self._metrics = metrics
        self._requests = requests
        self._start_s = time.perf_counter()
        self._last_token_s = [0.0] * len(requests)  # by choice; 0.0 before its first token

    def requests_submitted(self) -> None:
        """Count the prompt tokens of engine requests that the router has accepted; a prompt counts once for all its choices."""
        prompts = (request.num_prompt_tokens for request in self._requests if request.choice_index == 0)
        self._metrics.prompt_tokens.inc(sum(prompts))

    def event_received(self, index: int, event: OutputEvent) -> None:
        """Measure the latency of an output event of choice `index`, which has arrived and is about to be sent."""
        if not event.token_ids:
            return
        now_s = time.perf_counter()
        if self._last_token_s[index]:
            self._metrics.inter_token_s.observe(now_s - self._last_token_s[index])
        else:
            self._metrics.first_token(now_s - self._start_s, self._requests[index].request_id)
        self._last_token_s[index] = now_s

    def event_sent(self, event: OutputEvent) -> None:
        """Count the tokens of an event that the client gets; the event of a request with `echo` and `max_tokens` 0 has none."""
        if event.token_ids:
            self._metrics.output_tokens.inc(len(event.token_ids))

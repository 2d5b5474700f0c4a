"""Requests that no worker has, new ones and those whose worker was lost: each goes to the best worker that may take it.

The request queue hears what happens on all connections. It decides where a lost request continues (`failover` has the rule), and
keeps a request that no worker can take now.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from transom_cluster.router.background_tasks import BackgroundTasks
from transom_cluster.router.failover import RELEASE_TOKENS, Cause, after_loss, lost_too_often, poison
from transom_cluster.router.in_flight_requests import InFlightRequest
from transom_cluster.router.model_limits import NO_WORKER, ModelLimitsTracker
from transom_cluster.router.worker_availability import WillingWorkers
from transom_cluster.router.worker_connection import Attempts, ConnectionBroken, WorkerConnection
from transom_cluster.routing.placer import Placer
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_cluster.telemetry.tracebacks import traceback_lines
from transom_worker.config import FailoverConfig
from transom_worker.contract import ErrorInfo, OutputEvent, Request, WorkerMessage
from transom_worker.errors import Overloaded, RequestTimeout, WorkerLost

logger = logging.getLogger("transom.router")

RETRY_S = 0.25  # after which workers that refused are asked again
MAX_WAITING = 4096  # new requests without a worker; resumed ones always wait

LATE = "The request's deadline has passed."
TOO_MANY = "{n} requests wait for a worker already; try again later."


class RequestQueue:
    """Places requests among `connections`, and again when they are lost.

    The queue runs on one event loop and implements `ConnectionListener`.
    """

    def __init__(
        self,
        connections: Mapping[str, WorkerConnection],
        placer: Placer,
        config: FailoverConfig,
        metrics: RouterMetrics,
        *,
        limits: ModelLimitsTracker,
        wake_workers: Callable[[], None],
    ) -> None:
        self._connections = connections
        self._placer = placer
        self._config = config
        self._metrics = metrics
        self._limits = limits
        self._wake_workers = wake_workers
        self._tasks = BackgroundTasks()
        self._waiting: dict[InFlightRequest, None] = {}  # in the order in which they came
        self._willing = WillingWorkers(connections)
        self._soon: asyncio.Handle | None = None
        self._tick: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, requests: Iterable[InFlightRequest]) -> None:
        """Get these to workers, at once where one can take them."""
        requests, until_s = list(requests), time.monotonic() + self._config.wait_s
        for request in requests:
            request.wait_until_s = until_s
            request.watch_deadline(self._expire)
        self._place(requests)

    def withdraw(self, requests: Iterable[InFlightRequest]) -> None:
        """Forget what has not ended of these and abort it, wherever it is; returns at once."""
        by_worker: dict[str, list[InFlightRequest]] = {}
        for request in requests:
            if request.has_ended:
                continue
            request.end()
            self._waiting.pop(request, None)
            if request.worker_id is not None:
                by_worker.setdefault(request.worker_id, []).append(request)
        for worker_id, its_requests in by_worker.items():
            for request in its_requests:
                self._left(request)
            if (connection := self._connections.get(worker_id)) is not None:
                connection.withdraw(its_requests)

    async def stop(self) -> None:
        """End what is being done; nothing may wait any more."""
        for handle in (self._soon, self._tick):
            if handle is not None:
                handle.cancel()
        await self._tasks.cancel()

    def opened(self, connection: WorkerConnection) -> None:
        """See `ConnectionListener`."""
        assert connection.info is not None
        self._placer.add_worker(connection.worker_id, connection.info)
        self._metrics.worker_changed("joined")
        self._limits.update(self._connections.values())
        self._willing.is_rested(connection.worker_id)
        self._serve_soon()

    def closed(self, connection: WorkerConnection) -> None:
        """See `ConnectionListener`."""
        self._placer.remove_worker(connection.worker_id)
        self._metrics.worker_changed("drained" if connection.is_closing else "lost")
        self._willing.is_rested(connection.worker_id)

    def told(self, connection: WorkerConnection, message: WorkerMessage) -> None:
        """See `ConnectionListener`."""
        if not self._placer.update(connection.worker_id, message):
            connection.resync()

    def advanced(self, request: InFlightRequest, event: OutputEvent) -> None:
        """See `ConnectionListener`."""
        if not request.has_begun:
            request.has_begun = True
            self._admitted(request)
        if event.usage is not None and event.token_ids:
            self._placer.first_event(event.request_id, event.usage)
        if request.has_ended:
            self._left(request)
        elif not request.record.is_suspect or request.num_new_tokens >= RELEASE_TOKENS:  # or somebody else was named
            request.record.release()
            self._vacate(request)

    def lost(self, connection: WorkerConnection, requests: list[InFlightRequest], cause: Cause) -> None:
        """See `ConnectionListener`."""
        requests = [request for request in requests if not request.has_ended]
        for request in requests:
            request.timeline.lost(request.index, connection.worker_id, cause, len(request.token_ids))
            self._left(request)
        max_num_seqs = None if connection.load is None else connection.load.max_num_seqs
        verdict = after_loss(requests, cause, self._config, max_num_seqs=max_num_seqs)
        for request in verdict.culprits:
            self._give_up(request, "poison", poison(request.record))
        for request in verdict.given_up:
            self._give_up(request, "gave_up", lost_too_often(request.record))
        for request in verdict.going_on:
            request.is_resuming = True
            request.refusals.clear()
        self.enter(verdict.going_on)
        self._serve_soon()

    def failed(self, request: InFlightRequest, error: Exception) -> None:
        """See `ConnectionListener`."""
        try:
            self._left(request)
        finally:
            if not request.has_ended:
                request.fail(error)

    def _place(self, requests: Iterable[InFlightRequest]) -> None:
        """Send each to the best worker that may take it; the others wait."""
        groups: dict[str, list[tuple[InFlightRequest, Request]]] = {}
        open_ids = self._willing.open_ids()
        for request in requests:
            if request.has_ended:
                self._waiting.pop(request, None)
                continue
            willing = [worker_id for worker_id in open_ids if worker_id not in request.refusals]
            among = self._willing.without_suspect(willing) if request.record.is_suspect else willing
            if among:
                self._waiting.pop(request, None)
                try:
                    worker_id = self._assign(request, among)
                except Exception as error:  # a bug: neither this client nor the others may wait for ever because of it
                    details = "".join(traceback_lines(error, with_messages=False))
                    about = {"request_id": request.original.request_id}
                    logger.error(
                        "Request %s could not be placed.\n%s", request.original.request_id, details, extra=about
                    )
                    request.fail(error)
                    continue
                groups.setdefault(worker_id, []).append((request, request.attempt))
            else:
                self._wait(request, in_line=bool(willing), is_refused=bool(open_ids))
        for worker_id, group in groups.items():
            self._tasks.spawn(self._send(self._connections[worker_id], group))
        if self._waiting and not open_ids:
            self._wake_workers()

    def _assign(self, request: InFlightRequest, among: list[str]) -> str:
        attempt = request.begin_attempt()
        placed = self._placer.place(attempt, among)
        request.go_to(placed, policy=self._placer.policy)
        if request.record.is_suspect:
            self._willing.examine(request, placed.worker_id)
        self._connections[placed.worker_id].in_flight.add(request)
        return placed.worker_id

    def _wait(self, request: InFlightRequest, *, in_line: bool, is_refused: bool) -> None:
        """Nobody can take it now. A new request ends here if those who are there have too much to do."""
        refusals = [info.error() for info in request.refusals.values()]
        full = next((error for error in refusals if isinstance(error, Overloaded)), None)
        if full is not None and is_refused and not in_line and not request.is_admitted:
            self._waiting.pop(request, None)
            request.fail(full)
            return
        if not request.is_admitted and request not in self._waiting and len(self._waiting) >= MAX_WAITING:
            request.fail(Overloaded(TOO_MANY.format(n=len(self._waiting))))
            return
        if in_line:  # the line moves
            request.wait_until_s = time.monotonic() + self._config.wait_s
        if request not in self._waiting:
            request.timeline.waits(
                request.index, "suspect" if in_line else "workers full" if is_refused else "no worker"
            )
        self._waiting[request] = None
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(RETRY_S, self._on_tick)

    async def _send(self, connection: WorkerConnection, group: Attempts) -> None:
        group = [(request, attempt) for request, attempt in group if connection.in_flight.has(attempt.request_id)]
        if not group:
            return
        try:
            results = await connection.submit(group)
        except ConnectionBroken:
            return
        again = []
        for (request, attempt), error in zip(group, results, strict=True):
            if request.attempt is not attempt or request.has_ended:
                continue
            if not any(results):
                self._admitted(request)
            elif connection.in_flight.remove(attempt.request_id) is not None and self._refused(
                request, connection, error
            ):
                again.append(request)
        self._place(again)

    def _admitted(self, request: InFlightRequest) -> None:
        if request.is_resuming:
            request.is_resuming = False
            self._metrics.failover("resumed")
        request.admit()

    def _refused(self, request: InFlightRequest, connection: WorkerConnection, error: ErrorInfo | None) -> bool:
        """Whether to try again: with others where this worker is full or gone, here where another request was at fault."""
        self._left(request)
        if error is None:
            return True
        if isinstance(error.error(), WorkerLost):
            self._willing.rest(connection.worker_id)
        if isinstance(error.error(), (Overloaded, WorkerLost)):
            request.timeline.turned_away(request.index, connection.worker_id, error.kind)
            request.refusals[connection.worker_id] = error
            return True
        request.fail(error.error())
        return False

    def _left(self, request: InFlightRequest) -> None:
        """A request is no longer at its worker."""
        self._vacate(request)
        request.worker_id = None
        self._placer.ended(request.attempt.request_id)

    def _vacate(self, request: InFlightRequest) -> None:
        """Its worker may take another suspect."""
        if self._willing.vacate(request):
            self._serve_soon()

    def _give_up(self, request: InFlightRequest, outcome: str, error: Exception) -> None:
        request_id, num_losses = request.original.request_id, request.record.num_losses
        about = {"request_id": request_id}
        logger.error("Request %s is given up (%s) after %d losses.", request_id, outcome, num_losses, extra=about)
        self._metrics.failover(outcome)
        request.fail(error)

    def _expire(self, request: InFlightRequest) -> None:
        if not request.has_ended:
            self.withdraw([request])
            request.fail(RequestTimeout(LATE))

    def _serve_soon(self) -> None:
        if self._soon is None and self._waiting:
            self._soon = asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._soon = None
        self._place(self._line())

    def _line(self) -> list[InFlightRequest]:
        return sorted(self._waiting, key=lambda request: request.place_in_line)

    def _on_tick(self) -> None:
        """Some have waited long enough; the others may ask again those who refused."""
        self._tick = None
        now_s = time.monotonic()
        for request in list(self._waiting):
            request.refusals.clear()
            if now_s >= request.wait_until_s:
                del self._waiting[request]
                error = WorkerLost(NO_WORKER.format(wait_s=self._config.wait_s))
                if request.is_resuming:
                    self._give_up(request, "gave_up", error)
                else:
                    request.fail(error)
        self._place(self._line())

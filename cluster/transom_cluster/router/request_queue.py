"""Requests that no worker has, new ones and those whose worker was lost: each goes to the best worker that may take it.

It is told what happens on all links, so it decides where a lost request goes on (`failover` has the rule), and waits where nobody
can take it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from transom_cluster.router.background_tasks import BackgroundTasks
from transom_cluster.router.failover import RELEASE_TOKENS, Cause, after_loss, lost_too_often, poison
from transom_cluster.router.in_flight_requests import Flight
from transom_cluster.router.model_limits import NO_WORKER, KnownLimits
from transom_cluster.router.worker_availability import WillingWorkers
from transom_cluster.router.worker_connection import Attempts, LinkBroken, WorkerLink
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


class WaitingRoom:
    """Places requests among `links`, and again when they are lost. Runs on one event loop; implements `LinkListener`."""

    def __init__(
        self,
        links: Mapping[str, WorkerLink],
        placer: Placer,
        config: FailoverConfig,
        metrics: RouterMetrics,
        *,
        limits: KnownLimits,
        wake_workers: Callable[[], None],
    ) -> None:
        self._links = links
        self._placer = placer
        self._config = config
        self._metrics = metrics
        self._limits = limits
        self._wake_workers = wake_workers
        self._tasks = BackgroundTasks()
        self._waiting: dict[Flight, None] = {}  # in the order in which they came
        self._willing = WillingWorkers(links)
        self._soon: asyncio.Handle | None = None
        self._tick: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, flights: Iterable[Flight]) -> None:
        """Get these to workers, at once where one can take them."""
        flights, until_s = list(flights), time.monotonic() + self._config.wait_s
        for flight in flights:
            flight.wait_until_s = until_s
            flight.watch_deadline(self._expire)
        self._place(flights)

    def withdraw(self, answer_flights: Iterable[Flight]) -> None:
        """Forget what has not ended of these and abort it, wherever it is; returns at once."""
        by_worker: dict[str, list[Flight]] = {}
        for flight in answer_flights:
            if flight.has_ended:
                continue
            flight.end()
            self._waiting.pop(flight, None)
            if flight.worker_id is not None:
                by_worker.setdefault(flight.worker_id, []).append(flight)
        for worker_id, flights in by_worker.items():
            for flight in flights:
                self._left(flight)
            if (link := self._links.get(worker_id)) is not None:
                link.withdraw(flights)

    async def stop(self) -> None:
        """End what is being done; nothing may wait any more."""
        for handle in (self._soon, self._tick):
            if handle is not None:
                handle.cancel()
        await self._tasks.cancel()

    def opened(self, link: WorkerLink) -> None:
        """See `LinkListener`."""
        assert link.info is not None
        self._placer.add_worker(link.worker_id, link.info)
        self._metrics.worker_changed("joined")
        self._limits.update(self._links.values())
        self._willing.is_rested(link.worker_id)
        self._serve_soon()

    def closed(self, link: WorkerLink) -> None:
        """See `LinkListener`."""
        self._placer.remove_worker(link.worker_id)
        self._metrics.worker_changed("drained" if link.is_closing else "lost")
        self._willing.is_rested(link.worker_id)

    def told(self, link: WorkerLink, message: WorkerMessage) -> None:
        """See `LinkListener`."""
        if not self._placer.update(link.worker_id, message):
            link.resync()

    def advanced(self, flight: Flight, event: OutputEvent) -> None:
        """See `LinkListener`."""
        if not flight.has_begun:
            flight.has_begun = True
            self._admitted(flight)
        if event.usage is not None and event.token_ids:
            self._placer.first_event(event.request_id, event.usage)
        if flight.has_ended:
            self._left(flight)
        elif not flight.record.is_suspect or flight.num_new_tokens >= RELEASE_TOKENS:  # or somebody else was named
            flight.record.release()
            self._vacate(flight)

    def lost(self, link: WorkerLink, flights: list[Flight], cause: Cause) -> None:
        """See `LinkListener`."""
        flights = [flight for flight in flights if not flight.has_ended]
        for flight in flights:
            flight.life.lost(flight.index, link.worker_id, cause, len(flight.token_ids))
            self._left(flight)
        max_num_seqs = None if link.load is None else link.load.max_num_seqs
        verdict = after_loss(flights, cause, self._config, max_num_seqs=max_num_seqs)
        for flight in verdict.culprits:
            self._give_up(flight, "poison", poison(flight.record))
        for flight in verdict.given_up:
            self._give_up(flight, "gave_up", lost_too_often(flight.record))
        for flight in verdict.going_on:
            flight.is_resuming = True
            flight.refusals.clear()
        self.enter(verdict.going_on)
        self._serve_soon()

    def failed(self, flight: Flight, error: Exception) -> None:
        """See `LinkListener`."""
        try:
            self._left(flight)
        finally:
            if not flight.has_ended:
                flight.fail(error)

    def _place(self, flights: Iterable[Flight]) -> None:
        """Send each to the best worker that may take it; the others wait."""
        groups: dict[str, list[tuple[Flight, Request]]] = {}
        open_ids = self._willing.open_ids()
        for flight in flights:
            if flight.has_ended:
                self._waiting.pop(flight, None)
                continue
            willing = [worker_id for worker_id in open_ids if worker_id not in flight.refusals]
            among = self._willing.without_suspect(willing) if flight.record.is_suspect else willing
            if among:
                self._waiting.pop(flight, None)
                try:
                    worker_id = self._assign(flight, among)
                except Exception as error:  # a bug: neither this client nor the others may wait for ever because of it
                    details = "".join(traceback_lines(error, with_messages=False))
                    about = {"request_id": flight.request.request_id}
                    logger.error("Request %s could not be placed.\n%s", flight.request.request_id, details, extra=about)
                    flight.fail(error)
                    continue
                groups.setdefault(worker_id, []).append((flight, flight.attempt))
            else:
                self._wait(flight, in_line=bool(willing), is_refused=bool(open_ids))
        for worker_id, group in groups.items():
            self._tasks.spawn(self._send(self._links[worker_id], group))
        if self._waiting and not open_ids:
            self._wake_workers()

    def _assign(self, flight: Flight, among: list[str]) -> str:
        attempt = flight.begin_attempt()
        placed = self._placer.place(attempt, among)
        flight.go_to(placed, policy=self._placer.policy)
        if flight.record.is_suspect:
            self._willing.examine(flight, placed.worker_id)
        self._links[placed.worker_id].in_flight.add(flight)
        return placed.worker_id

    def _wait(self, flight: Flight, *, in_line: bool, is_refused: bool) -> None:
        """Nobody can take it now. A new request ends here if those who are there have too much to do."""
        refusals = [info.error() for info in flight.refusals.values()]
        full = next((error for error in refusals if isinstance(error, Overloaded)), None)
        if full is not None and is_refused and not in_line and not flight.is_admitted:
            self._waiting.pop(flight, None)
            flight.fail(full)
            return
        if not flight.is_admitted and flight not in self._waiting and len(self._waiting) >= MAX_WAITING:
            flight.fail(Overloaded(TOO_MANY.format(n=len(self._waiting))))
            return
        if in_line:  # the line moves
            flight.wait_until_s = time.monotonic() + self._config.wait_s
        if flight not in self._waiting:
            flight.life.waits(flight.index, "suspect" if in_line else "workers full" if is_refused else "no worker")
        self._waiting[flight] = None
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(RETRY_S, self._on_tick)

    async def _send(self, link: WorkerLink, group: Attempts) -> None:
        group = [(flight, attempt) for flight, attempt in group if link.in_flight.has(attempt.request_id)]
        if not group:
            return
        try:
            results = await link.submit(group)
        except LinkBroken:
            return
        again = []
        for (flight, attempt), error in zip(group, results, strict=True):
            if flight.attempt is not attempt or flight.has_ended:
                continue
            if not any(results):
                self._admitted(flight)
            elif link.in_flight.remove(attempt.request_id) is not None and self._refused(flight, link, error):
                again.append(flight)
        self._place(again)

    def _admitted(self, flight: Flight) -> None:
        if flight.is_resuming:
            flight.is_resuming = False
            self._metrics.failover("resumed")
        flight.admit()

    def _refused(self, flight: Flight, link: WorkerLink, error: ErrorInfo | None) -> bool:
        """Whether to try again: with others where this worker is full or gone, here where another request was at fault."""
        self._left(flight)
        if error is None:
            return True
        if isinstance(error.error(), WorkerLost):
            self._willing.rest(link.worker_id)
        if isinstance(error.error(), (Overloaded, WorkerLost)):
            flight.life.turned_away(flight.index, link.worker_id, error.kind)
            flight.refusals[link.worker_id] = error
            return True
        flight.fail(error.error())
        return False

    def _left(self, flight: Flight) -> None:
        """A flight is no longer at its worker."""
        self._vacate(flight)
        flight.worker_id = None
        self._placer.ended(flight.attempt.request_id)

    def _vacate(self, flight: Flight) -> None:
        """Its worker may take another suspect."""
        if self._willing.vacate(flight):
            self._serve_soon()

    def _give_up(self, flight: Flight, outcome: str, error: Exception) -> None:
        request_id, num_losses = flight.request.request_id, flight.record.num_losses
        about = {"request_id": request_id}
        logger.error("Request %s is given up (%s) after %d losses.", request_id, outcome, num_losses, extra=about)
        self._metrics.failover(outcome)
        flight.fail(error)

    def _expire(self, flight: Flight) -> None:
        if not flight.has_ended:
            self.withdraw([flight])
            flight.fail(RequestTimeout(LATE))

    def _serve_soon(self) -> None:
        if self._soon is None and self._waiting:
            self._soon = asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._soon = None
        self._place(self._line())

    def _line(self) -> list[Flight]:
        return sorted(self._waiting, key=lambda flight: flight.place_in_line)

    def _on_tick(self) -> None:
        """Some have waited long enough; the others may ask again those who refused."""
        self._tick = None
        now_s = time.monotonic()
        for flight in list(self._waiting):
            flight.refusals.clear()
            if now_s >= flight.wait_until_s:
                del self._waiting[flight]
                error = WorkerLost(NO_WORKER.format(wait_s=self._config.wait_s))
                if flight.is_resuming:
                    self._give_up(flight, "gave_up", error)
                else:
                    flight.fail(error)
        self._place(self._line())

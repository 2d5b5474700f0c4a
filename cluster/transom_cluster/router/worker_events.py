"""`WorkerEvents`: handles what happens on the connections to workers: messages, output, and losses.

`WorkerEvents.follow` keeps one connection open. It reads the connection's events, and calls the request queue, the placer and the
in-flight requests; none of these calls back. The rule in `failover` decides what happens to the requests of a lost worker.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from transom_cluster.router.failover import GAVE_UP, POISON, RELEASE_TOKENS, FailoverDecision, LossReport, after_loss
from transom_cluster.router.in_flight_requests import InFlightRequest
from transom_cluster.router.model_limits import ModelLimitsTracker
from transom_cluster.router.request_queue import RequestQueue
from transom_cluster.router.timings import RouterTimings
from transom_cluster.router.worker_connection import Lost, Opened, Received, WorkerConnection
from transom_cluster.routing.placer import Placer
from transom_cluster.telemetry.request_events import HandedOver, Lost as LostEvent
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_cluster.telemetry.tracebacks import stack_of
from transom_core.config import FailoverConfig
from transom_core.contract import OutputEvent, WorkerMessage
from transom_core.errors import PoisonRequest, WorkerLost

logger = logging.getLogger("transom.router")


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerEvents:
    """Follows the connections to all workers, on one event loop."""

    connections: Mapping[str, WorkerConnection]
    queue: RequestQueue
    placer: Placer
    config: FailoverConfig
    metrics: RouterMetrics
    limits: ModelLimitsTracker
    timings: RouterTimings

    async def follow(self, connection: WorkerConnection) -> None:
        """Keep a connection open until it drains, and handle what happens on it. Cancelling this call ends the stream."""
        pause_s = self.timings.first_reconnect_pause_s
        while not connection.is_draining:
            error: Exception | None = None
            try:
                async with contextlib.aclosing(connection.read()) as events:
                    async for event in events:
                        self.handle(connection, event)
            except Exception as caught:
                error = caught
            finally:
                lost = connection.lose(error)
                if lost is not None:
                    self.handle(connection, lost)
            if lost is not None:
                num_lost = len(lost.requests)
                logger.warning(
                    "The event stream of worker %s broke (%d requests): %r", connection.worker_id, num_lost, error
                )
                pause_s = self.timings.first_reconnect_pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self.timings.longest_reconnect_pause_s)

    def handle(self, connection: WorkerConnection, event: Opened | Received | Lost) -> None:
        """Handle one event of a connection. Only a bug in handling `Opened` or an index update raises; the stream then ends."""
        match event:
            case Opened(is_new):
                if is_new:
                    self.metrics.worker_changes.of("joined").inc()
                self._opened(connection)
            case Received(message):
                self._received(connection, message)
            case Lost():
                if event.is_closed:
                    self._closed(connection)
                self._lost(connection, event)

    def _opened(self, connection: WorkerConnection) -> None:
        assert connection.info is not None
        self.placer.add_worker(connection.worker_id, connection.info)
        open_limits = [one.limits for one in self.connections.values() if one.takes_requests]
        self.limits.update(limits for limits in open_limits if limits is not None)
        if not connection.speaks_our_tokens:
            logger.warning(
                "Worker %s has another tokenizer than this router: it gets no requests from here.", connection.worker_id
            )
        connection.cooldown_until_s = 0.0
        self.queue.place_soon()

    def _closed(self, connection: WorkerConnection) -> None:
        try:
            self.placer.remove_worker(connection.worker_id)
            self.metrics.worker_changes.of("drained" if connection.is_closing else "lost").inc()
        except Exception as bug:  # the lost requests must migrate even so
            logger.error("Handling the loss of worker %s failed.\n%s", connection.worker_id, stack_of(bug))

    def _received(self, connection: WorkerConnection, message: WorkerMessage) -> None:
        """Take in updates of the worker's prefix index and load, and hand its output to the requests."""
        has_news = message.kv is not None or message.load is not None
        if has_news and not self.placer.update(connection.worker_id, message):
            connection.resync()
        torn: list[InFlightRequest] = []  # output before their event is missing
        lost: list[InFlightRequest] = []  # the worker itself reports that it has lost them
        reason: WorkerLost | None = None
        for event in message.events:
            request = connection.in_flight.get(event.request_id)
            if request is None:
                continue  # the attempt was withdrawn
            try:
                if event.error is not None and isinstance(error := event.error.error(), WorkerLost):
                    lost.append(request)
                    reason = error
                elif request.take(event):
                    if request.has_ended or event.is_handover:
                        connection.in_flight.remove(event.request_id)
                    self._advanced(request, event)
                    continue
                else:
                    torn.append(request)
            except Exception as bug:  # it ends only this request
                self._fail(request, bug)
                connection.abort_soon([event.request_id])
            connection.in_flight.remove(event.request_id)
        if torn:
            logger.warning("Output of %d requests from worker %s is missing.", len(torn), connection.worker_id)
            connection.abort_soon([request.attempt.request_id for request in torn])
            self._lost(connection, Lost(torn, "torn"))
        if lost:
            self._lost(connection, Lost(lost, "lost", reason))

    def _advanced(self, request: InFlightRequest, event: OutputEvent) -> None:
        """Handle the progress of a request that has taken an event, which may be its last one."""
        if event.usage is not None and event.token_ids:
            self.placer.first_event(event.request_id, event.usage)
        has_passed = request.num_new_tokens >= RELEASE_TOKENS  # it is beyond the step at which a worker was lost
        if (request.has_ended or has_passed) and request.record.num_losses:
            self.metrics.judgements.of("released").inc(request.record.is_suspect)
            request.record.release()
        if request.has_ended:
            self.queue.leave_worker(request)
        elif event.is_handover:
            self._handed_over(request)
        elif not request.record.is_suspect:  # perhaps since its release, or since another was found to be the culprit
            self.queue.end_quarantine(request)

    def _handed_over(self, request: InFlightRequest) -> None:
        """Queue a request again whose prefill worker has computed the first token, so that a decode worker continues it."""
        assert request.worker_id is not None
        request.events.report(
            HandedOver(choice=request.index, worker=request.worker_id, tokens_so_far=len(request.token_ids))
        )
        self.queue.leave_worker(request)
        request.refusals.clear()
        self.queue.enter([request])

    def _lost(self, connection: WorkerConnection, lost: Lost) -> None:
        """Let requests that cannot continue at their worker migrate, or end them with an error.

        If this itself fails, which is a bug, all of them end, so that none waits for ever.
        """
        requests = [request for request in lost.requests if not request.has_ended]
        try:
            decision = self._judge(connection, requests, lost)
            for request in decision.migrating:
                request.is_migrating = True
                request.refusals.clear()
            self.queue.quarantine.watch(decision.migrating)
            self.queue.enter(decision.migrating)
            self.queue.place_soon()
        except Exception as error:
            for request in requests:
                if not request.has_ended and request.worker_id in (None, connection.worker_id):
                    self._fail(request, error)

    def _judge(
        self, connection: WorkerConnection, requests: list[InFlightRequest], lost: Lost
    ) -> FailoverDecision[InFlightRequest]:
        """Take lost requests from their worker, decide what happens to them, and end those that are given up."""
        report = _loss_report(connection, lost.reason)
        decision = after_loss(requests, lost.cause, self.config, report)
        for request in requests:
            request.events.report(
                LostEvent(
                    choice=request.index,
                    worker=connection.worker_id,
                    cause=lost.cause,
                    loss_cause=report.cause if lost.cause == "lost" else None,
                    tokens_so_far=len(request.token_ids),
                )
            )
            self.queue.leave_worker(request)
        if lost.cause == "lost" and requests:
            judgements = self.metrics.judgements
            self.metrics.losses.of(report.cause).inc()
            judgements.of("suspected").inc(len(decision.verdict.suspected))
            judgements.of("cleared").inc(len(decision.verdict.cleared))
            judgements.of("culprit").inc(len(decision.culprits))
        for request in decision.culprits:
            self.queue.give_up(request, "poison", PoisonRequest(POISON.format(n=request.record.num_losses)))
        for request in decision.given_up:
            self.queue.give_up(request, "gave_up", WorkerLost(GAVE_UP.format(n=request.record.num_migrations + 1)))
        return decision

    def _fail(self, request: InFlightRequest, error: Exception) -> None:
        """End a request whose handling raised an error, which is a bug; other requests continue."""
        request_id = request.original.request_id
        logger.error(
            "Request %s failed in the router.\n%s", request_id, stack_of(error), extra={"request_id": request_id}
        )
        try:
            self.queue.forget(request)
        finally:
            if not request.has_ended:
                request.fail(error)


def _loss_report(connection: WorkerConnection, reason: Exception | None) -> LossReport:
    max_num_seqs = None if connection.load is None else connection.load.max_num_seqs
    if isinstance(reason, WorkerLost):
        return LossReport(cause=reason.loss_cause, max_num_seqs=max_num_seqs, num_lost=reason.num_lost)
    return LossReport(cause="silent" if isinstance(reason, TimeoutError) else "unknown", max_num_seqs=max_num_seqs)

"""The router's request queue gives each request that no worker has to the best worker that may take it.

New requests enter the queue, and so do requests that migrate because their worker was lost (`worker_events`). A request waits in
the queue while no worker may take it.

A worker may not take a request if

- the worker is not connected, or it drains;
- the worker has another model than the one that began the answer (`eligibility`);
- the worker refused the request since the last retry (every `RouterTimings.retry_s`);
- the worker is in **cooldown**: it answered a submission with `WorkerLost` less than `RouterTimings.cooldown_s` ago, and other
  workers are connected;
- the quarantine forbids it, because the request or another one is a suspect (`failover`, `eligibility`): a worker has at most one.

The queue tries a new request once, and then waiting ones in **sweeps**: a sweep tries every waiting request once, at most
`MAX_PLACED_AT_ONCE` per turn of the event loop. A sweep follows each event that may let a worker take a request (`place_soon`), and
each retry.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from transom_cluster.router.background_tasks import BackgroundTasks
from transom_cluster.router.client_turns import TurnQueue, WaitingRequests, charge
from transom_cluster.router.eligibility import MODEL_GONE, Quarantine, in_order_of_choice, is_gone, successor
from transom_cluster.router.in_flight_requests import InFlightRequest
from transom_cluster.router.model_limits import NO_WORKER
from transom_cluster.router.timings import RouterTimings
from transom_cluster.router.worker_connection import Attempts, ConnectionBroken, WorkerConnection
from transom_cluster.routing.placer import Placer
from transom_cluster.telemetry.request_events import FailoverOutcome, Queued, TurnedAway
from transom_cluster.telemetry.tracebacks import stack_of
from transom_core.config import FailoverConfig, SchedulingPolicy
from transom_core.contract import ErrorInfo, Request
from transom_core.errors import Overloaded, RequestTimeout, WorkerLost
from transom_core.virtual_time import VirtualTime

logger = logging.getLogger("transom.router")

MAX_PLACED_AT_ONCE = 32  # placed in one turn of the event loop, which carries every client's stream: about 3 ms
MAX_WAITING_TOKENS = 2**23  # prompt tokens of new requests in the queue, which take up to 300 MB
MAX_WAITING = 4096  # new requests in the queue; requests whose worker was lost always enter it

LATE = "The request's deadline has passed."
TOO_MANY = "{n} requests wait for a worker already; try again later."


class RequestQueue:
    """Gives requests to the workers of `connections`, and gives them to other workers when a worker is lost.

    The queue runs on one event loop. `wake_workers` asks for a worker if autoscaling has stopped all of them.
    """

    def __init__(
        self,
        connections: Mapping[str, WorkerConnection],
        placer: Placer,
        config: FailoverConfig,
        *,
        policy: SchedulingPolicy = "fcfs",
        wake_workers: Callable[[], None],
        timings: RouterTimings,
    ) -> None:
        self._connections = connections
        self._placer = placer
        self._config = config
        self._policy = policy
        self._wake_workers = wake_workers
        self._timings = timings
        self.quarantine = Quarantine(max_lost_workers=config.max_lost_workers)
        self._submissions = BackgroundTasks()
        self._turns = VirtualTime()
        self._arrived = TurnQueue(self._turns, policy)  # requests that the queue has not tried to place yet
        self._waiting = WaitingRequests()
        self._sweep: TurnQueue | None = None  # waiting requests that the present sweep has still to try to place
        self._sweeps_again = False
        # client -> workers that refused a request of the client which still waits; emptied at each retry
        self._refusing: dict[str, set[str]] = {}
        self._placing_arrived: asyncio.Handle | None = None
        self._placing: asyncio.Handle | None = None  # the call that begins or continues a sweep
        self._retry: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def _is_full(self) -> bool:
        return len(self._waiting) >= MAX_WAITING or self._waiting.num_tokens >= MAX_WAITING_TOKENS

    def enter(self, requests: Iterable[InFlightRequest]) -> None:
        """Give requests to workers, by turns of their clients. The first ones are placed at once if a worker may take them."""
        requests, now_s = list(requests), time.monotonic()
        for request in requests:
            request.queued_s, request.wait_until_s = now_s, now_s + self._config.wait_s
            request.watch_deadline(self._expire, grace_s=self._timings.deadline_grace_s)
            self._arrived.add(request)
        if self._placing_arrived is None:
            self._place_arrived()

    def withdraw(self, requests: Iterable[InFlightRequest]) -> None:
        """End the requests that have not ended, and abort them at their workers. Returns at once, before the workers have
        answered."""
        by_worker: dict[str, list[InFlightRequest]] = {}
        for request in requests:
            if request.has_ended:
                continue
            request.end()
            self._waiting.discard(request)
            if request.worker_id is not None:
                by_worker.setdefault(request.worker_id, []).append(request)
        for worker_id, its_requests in by_worker.items():
            for request in its_requests:
                self.leave_worker(request)
            if (connection := self._connections.get(worker_id)) is not None:
                connection.withdraw(its_requests)

    async def stop(self) -> None:
        """Cancel the queue's tasks and timers. No request may be waiting any more."""
        for handle in (self._placing_arrived, self._placing, self._retry):
            if handle is not None:
                handle.cancel()
        await self._submissions.cancel()

    def leave_worker(self, request: InFlightRequest) -> None:
        """Note that a request is no longer at its worker."""
        self.end_quarantine(request)
        request.leave_worker()
        self._placer.ended(request.attempt.request_id)

    def forget(self, request: InFlightRequest) -> None:
        """Note that a request, which is about to end, is neither in the queue nor at a worker."""
        self._waiting.discard(request)
        self.leave_worker(request)

    def end_quarantine(self, request: InFlightRequest) -> None:
        """Let the request's worker take another suspect if this request was its suspect. Otherwise let a request on trial try
        again: it may have waited for this one to make progress or leave."""
        connection = None if request.worker_id is None else self._connections.get(request.worker_id)
        if connection is not None and connection.suspect is request:
            connection.suspect = None
            self.place_soon()
        elif self.quarantine.trials:
            self.place_soon()

    def give_up(self, request: InFlightRequest, outcome: FailoverOutcome, error: Exception) -> None:
        """End a request whose worker was lost, with `error`."""
        _log_error(request, "Request %s ends (%s) after %d losses.", outcome, request.record.num_losses)
        request.fail(error, failover=outcome)

    def place_soon(self) -> None:
        """Try to place the waiting requests in the event loop's next turn."""
        if self._placing is None and self._waiting:
            self._placing = asyncio.get_running_loop().call_soon(self._place_waiting)
        elif self._sweep is not None:
            self._sweeps_again = True

    # Giving requests to workers

    def _place(self, requests: Iterable[InFlightRequest]) -> None:
        """Give each request to the best worker that may take it; requests that no worker may take wait.

        A worker that refused a request which still waits gets no later request of this client, because that would overtake the
        waiting one. A worker accepts all or none of a submission, and it may refuse one client, which has its share of the worker
        already; so each submission has the requests of one client only.
        """
        groups: dict[tuple[str, str], list[tuple[InFlightRequest, Request]]] = {}
        available = self._available()
        has_choice = len({one.identity for one in available}) > 1
        refusing = self._refusing if self._waiting else {}
        for request in requests:
            if request.has_ended:
                self._waiting.discard(request)
                continue
            client = request.original.client
            try:
                worker_id = self._place_one(request, available, refusing.get(client, set()), has_choice=has_choice)
            except Exception as error:  # a bug, because of which no request must wait for ever
                _log_error(request, "Request %s could not be placed.\n%s", stack_of(error))
                self.forget(request)
                request.fail(error)
                continue
            if worker_id is not None:
                groups.setdefault((worker_id, client), []).append((request, request.attempt))
        for (worker_id, _), group in groups.items():
            self._submissions.spawn(self._submit(self._connections[worker_id], group))
        if self._waiting and not available:
            self._wake_workers()

    def _place_one(
        self, request: InFlightRequest, available: Sequence[WorkerConnection], refusing: set[str], *, has_choice: bool
    ) -> str | None:
        """Return the id of the worker that the request is given to; None if it waits or has ended. A new request is given to none
        of the workers `refusing` its client. With `has_choice` the `available` workers have more than one identity."""
        refused = request.refusals.keys() | (set() if request in self._waiting else refusing)
        willing = [one for one in available if one.worker_id not in refused]
        by_choice = [willing] if willing else []
        pinned = request.output.identity
        if pinned is not None or has_choice:
            by_choice = in_order_of_choice(willing, pinned)
        allowed = next(filter(None, (self.quarantine.allowed(request, those) for those in by_choice)), None)
        if allowed is not None:
            self._waiting.discard(request)
            charge(self._turns, request)
            return self._assign(request, [one.worker_id for one in allowed], available)
        if pinned is not None and is_gone(pinned, self._connections):
            if (now := successor(pinned, self._connections.values())) is not None:
                request.weights_replaced(now)
                return self._place_one(request, available, refusing, has_choice=has_choice)
            self._waiting.discard(request)
            self.give_up(request, "gave_up", WorkerLost(MODEL_GONE))
        else:
            self._wait(request, is_quarantined=bool(by_choice), is_refused=bool(available))
        return None

    def _available(self) -> list[WorkerConnection]:
        """Return the workers that take requests, without those in cooldown unless all are."""
        connected, now_s = [one for one in self._connections.values() if one.takes_requests], time.monotonic()
        return [one for one in connected if one.cooldown_until_s <= now_s] or connected

    def _assign(self, request: InFlightRequest, worker_ids: list[str], available: Iterable[WorkerConnection]) -> str:
        """Let the routing policy choose one of the workers `worker_ids`, which have one identity; return its id.

        The worker may fetch cached prefixes from any `available` worker of this identity that has no suspect: a suspect may kill
        its worker at any moment.
        """
        attempt = request.begin_attempt()
        identity = self._connections[worker_ids[0]].identity
        sources = [one.worker_id for one in available if one.suspect is None and one.identity == identity]
        decision = self._placer.place(attempt, worker_ids, sources=sources)
        request.place(decision, policy=self._placer.policy, identity=identity)
        connection = self._connections[decision.worker_id]
        if request.record.is_suspect:
            connection.suspect = request
        connection.in_flight.add(request)
        return decision.worker_id

    def _wait(self, request: InFlightRequest, *, is_quarantined: bool, is_refused: bool) -> None:
        """Let a request wait, or fail a new one if the connected workers or this queue are full.

        With `is_quarantined` only the quarantine keeps the request from a worker. With `is_refused` workers are connected, but none
        of them takes the request.
        """
        refusals = [info.error() for info in request.refusals.values()]
        full = next((error for error in refusals if isinstance(error, Overloaded)), None)
        if (
            full is not None
            and is_refused
            and not is_quarantined
            and not request.was_accepted
            and not self._keeps_from_others(request)
        ):
            self._waiting.discard(request)
            request.fail(full)
            return
        if not request.was_accepted and request not in self._waiting and not self._makes_room(request):
            request.fail(Overloaded(TOO_MANY.format(n=len(self._waiting))))
            return
        if is_quarantined:  # the request waits for suspects, not for a worker, so its time limit starts anew
            request.wait_until_s = time.monotonic() + self._config.wait_s
        if request not in self._waiting:
            reason: Literal["suspect", "workers full", "no worker"]
            reason = "suspect" if is_quarantined else "workers full" if is_refused else "no worker"
            request.events.report(Queued(choice=request.index, reason=reason))
        self._waiting.add(request)
        self._refusing.setdefault(request.original.client, set()).update(request.refusals)
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(self._timings.retry_s, self._on_retry)

    def _keeps_from_others(self, request: InFlightRequest) -> bool:
        """Return whether a worker of another identity could take a request that its answer's other choices pin to one identity.

        Such a request waits instead of failing: without the other choices, the worker might have taken it."""
        pinned = request.output.identity
        others = [one for one in self._available() if one.identity != pinned and one.worker_id not in request.refusals]
        return pinned is not None and bool(others)

    def _makes_room(self, newcomer: InFlightRequest) -> bool:
        """Make room for a newcomer in a full queue: fail requests of clients with larger shares. Return whether there is room."""
        while self._is_full:
            error = Overloaded(TOO_MANY.format(n=len(self._waiting)))
            displaced = self._waiting.one_to_displace(newcomer, max_requests=MAX_WAITING, max_tokens=MAX_WAITING_TOKENS)
            if displaced is None:
                return False
            self._waiting.discard(displaced)
            displaced.fail(error)
        return True

    async def _submit(self, connection: WorkerConnection, group: Attempts) -> None:
        """Submit attempts to their worker; those that the worker refuses are placed again, or end."""
        group = [(request, attempt) for request, attempt in group if connection.in_flight.get(attempt.request_id)]
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
                request.accept()
            elif connection.in_flight.remove(attempt.request_id) is None:
                continue
            elif self._is_placed_again(request, connection, error):
                again.append(request)
        self._place(again)

    def _is_placed_again(self, request: InFlightRequest, connection: WorkerConnection, error: ErrorInfo | None) -> bool:
        """Handle a refused submission, and return whether to place the request again. If not, it has ended with the error.

        The request is placed again if another request of the submission was at fault (`error` is None). If the worker is full or
        lost, the request is placed again, but at another worker.
        """
        self.leave_worker(request)
        if error is None:
            return True
        if isinstance(error.error(), WorkerLost):
            connection.cooldown_until_s = time.monotonic() + self._timings.cooldown_s
        if isinstance(error.error(), (Overloaded, WorkerLost)):
            request.events.report(TurnedAway(choice=request.index, worker=connection.worker_id, error=error.kind))
            request.refusals[connection.worker_id] = error
            return True
        request.fail(error.error())
        return False

    def _expire(self, request: InFlightRequest) -> None:
        if not request.has_ended:
            self.withdraw([request])
            request.fail(RequestTimeout(LATE))

    def _place_arrived(self) -> None:
        """Place some of the requests that have arrived; place the others in the event loop's next turns."""
        piece = self._arrived.take(MAX_PLACED_AT_ONCE)
        loop = asyncio.get_running_loop()
        self._placing_arrived = loop.call_soon(self._place_arrived) if self._arrived else None
        self._place(piece)

    def _place_waiting(self) -> None:
        """Try to place some of the waiting requests; try the others in the event loop's next turns."""
        if self._sweep is None:
            self._sweep, self._sweeps_again = TurnQueue(self._turns, self._policy), False
            for request in self._waiting:
                self._sweep.add(request)
        piece = [request for request in self._sweep.take(MAX_PLACED_AT_ONCE) if request in self._waiting]
        self._placing = asyncio.get_running_loop().call_soon(self._place_waiting) if self._sweep else None
        if self._placing is None:
            self._sweep = None
            if self._sweeps_again:
                self.place_soon()
        self._place(piece)

    def _on_retry(self) -> None:
        """Fail requests that have waited too long, and try to place the others, even at workers that refused them before."""
        self._retry = None
        self._refusing.clear()
        now_s = time.monotonic()
        for request in list(self._waiting):
            request.refusals.clear()
            if now_s >= request.wait_until_s:
                self._waiting.discard(request)
                error = WorkerLost(NO_WORKER.format(wait_s=self._config.wait_s))
                if request.is_migrating:
                    self.give_up(request, "gave_up", error)
                else:
                    request.fail(error)
        self.place_soon()  # a sweep that runs goes on to its end, so that it reaches every request


def _log_error(request: InFlightRequest, message: str, *args: object) -> None:
    """Log an error about a request. The first placeholder of `message` is for the request's id."""
    request_id = request.original.request_id
    logger.error(message, request_id, *args, extra={"request_id": request_id})

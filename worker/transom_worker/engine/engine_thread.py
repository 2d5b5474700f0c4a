"""Runs an engine on a thread of its own, so that the step loop blocks neither a replica's event loop nor the caller of `LLM`.

Other threads post commands (add, abort, send the index) to an inbox. The engine's thread runs them between two steps; an idle
engine wakes up at once.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container
from concurrent.futures import Future
from typing import TypeVar

from transom_core.contract import ErrorInfo, OutputEvent, Request, WorkerMessage
from transom_core.errors import EngineDead, TransomError, WorkerLost
from transom_worker.engine.arrivals import Arrivals, Group
from transom_worker.engine.engine import RESTARTING, Engine
from transom_worker.engine.full_collections import IDLE_S, FullCollections
from transom_worker.engine.step_watchdog import Turns, Watchdog
from transom_worker.telemetry.transfer_report import FetchReport

logger = logging.getLogger("transom.worker")

LOAD_PERIOD_S = 0.05  # the worker's load is measured this often; `RouterOutbox` decides when a router learns of it

Deliver = Callable[[WorkerMessage], None]
T = TypeVar("T")


class EngineThread:
    """Owns an engine and its thread.

    The thread calls `deliver` with each step's events, the changes of the prefix index and, at most every `LOAD_PERIOD_S`, the
    worker's load.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Deliver,
        *,
        on_hang: Callable[[], None] = lambda: None,
        ends_process: bool = False,
    ) -> None:
        """Start the thread. If it hangs, its requests end with errors, and then `on_hang` is called on another thread.

        `ends_process`: the process is the worker's own. A hang that holds the GIL, so that no other Python code runs, ends it
        (`step_watchdog`), and full garbage collections run at idle moments (`full_collections`).
        """
        self._engine = engine
        self._deliver = deliver
        self._arrivals = Arrivals(self._add, self._end_group)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._load_at_s = 0.0
        self._taken: list[str] = []  # ids of admitted requests that no delivered load includes yet
        self._ended = False  # if set, the thread runs no more commands: `_post` runs them itself
        self._is_hung = False
        self._on_hang = on_hang
        self._collections = FullCollections(by_engine=ends_process)
        self._turns = Turns(engine.config.ranks, is_starting=lambda: engine.is_restarting or engine.is_updating)
        self._watchdog = Watchdog(self._turns, self._give_up, ends_process=ends_process)
        engine.executor.on_lost(self._wake.set)
        engine.on_disk_news(self._wake.set)
        self._thread = threading.Thread(target=self._run, name="transom-engine", daemon=True)
        self._thread.start()
        self._watchdog.start()

    def submit(self, requests: list[Request], *, held: Container[str] = ()) -> Future[list[ErrorInfo | None]]:
        """Admit all of `requests` or none. The future gets a list with, for each request, its error or None.

        Requests whose ids are in `held` do not run before `stop_holding`. Large groups are added in pieces between steps
        (`arrivals`), and after a refusal the other requests are not tried.

        The future cannot be cancelled: a caller that gives up must `abort` the requests. While ranks are restarted, all requests
        are refused at once.
        """
        future: Future[list[ErrorInfo | None]] = Future()
        future.set_running_or_notify_cancel()
        if self._engine.is_restarting:
            future.set_result([ErrorInfo.of(WorkerLost(RESTARTING))] * len(requests))
            return future
        arrival_s = self._engine.clock()  # a step may run now
        group = Group(requests=requests, arrival_s=arrival_s, fetched=held, future=future)
        self._post(lambda: self._arrivals.add(group))
        return future

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests and free their blocks before the next step."""

        def command() -> None:
            for request_id in request_ids:
                if not self._engine.abort(request_id):
                    self._arrivals.abort(request_id)

        self._post(command)

    def stop_holding(self, request_id: str, report: FetchReport) -> None:
        """Count a fetch that has ended, and let the held request run whose prefix it was; any other id is ignored."""
        self._post(lambda: self._engine.stop_holding(request_id, report))

    def send_index(self, deliver: Deliver) -> None:
        """Give one receiver the whole prefix index, in order with the changes that the thread's `deliver` receives."""

        def command() -> None:
            self._deliver_news([], with_load=True)
            index = self._engine.scheduler.cache.changes.whole()
            deliver(WorkerMessage(kv=index, load=self._engine.load()))

        self._post(command)

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Run `command` on the engine's thread between two steps; the future has its result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        self._post(run)
        return future

    @property
    def dead(self) -> Exception | None:
        """What ended the step loop; None while it runs."""
        return self._engine.dead or (None if self._thread.is_alive() else EngineDead("The engine's thread has ended."))

    def shutdown(self) -> None:
        """End the thread after the present step, then the engine; an unfinished restart of the ranks is interrupted. Idempotent.

        A thread that hangs, and the model's memory, stay until the process ends.
        """
        self._stopping = True
        self._wake.set()
        if self._engine.is_restarting:
            self._engine.executor.interrupt()
        while self._thread.is_alive() and not self._is_hung:
            self._thread.join(self._turns.period_s)
        self._watchdog.stop()
        if not self._is_hung:
            self._engine.shutdown()

    def _post(self, command: Callable[[], None]) -> None:
        """Queue a command for the engine's thread, and wake that thread; after its end run the command here."""
        self._inbox.append(command)
        self._wake.set()
        if self._ended:
            self._run_commands()

    def _run(self) -> None:
        try:
            self._loop()
            reason = EngineDead("The worker is shutting down.", loss_cause="stopped")
        except Exception as error:  # a bug, but no request may wait for ever because of it
            logger.exception("The engine's thread failed.")
            reason = EngineDead(f"The engine's thread failed: {type(error).__name__}: {error}", loss_cause="exception")
        self._turns.end()
        self._end(reason)

    def _loop(self) -> None:
        """Run commands and steps in turns until the thread is to end; sleep while there is no work."""
        while not self._stopping and not self._is_hung:
            self._turns.begin()
            self._run_commands()  # first: a group that arrived during the step takes part in this turn
            self._arrivals.next_turn()
            if self._engine.has_work:
                self._deliver_news(self._engine.step(self._deliver_news))
                if self._collections.is_overdue:
                    self._collections.run()
                if self._arrivals.is_busy:
                    continue
                if blocked_s := self._engine.blocked_s:
                    self._sleep(blocked_s)
            elif not self._arrivals.is_busy:
                self._deliver_news([], with_load=True)
                if not self._collections.is_due:
                    self._sleep(None)
                elif not self._sleep(IDLE_S):
                    self._collections.run()

    def _sleep(self, timeout_s: float | None) -> bool:
        """Wait for a command, news of the disk tier, the loss of a rank or the shutdown, up to `timeout_s` (None: no limit); return
        whether there is one."""
        self._turns.end()
        woken = self._wake.wait(timeout_s)
        self._wake.clear()
        return woken

    def _give_up(self, error: EngineDead) -> None:
        """End the requests of a thread that hangs; the watchdog calls this. What the hung thread does later has no effect."""
        self._is_hung = True
        self._engine.executor.interrupt()
        self._end(error)
        self._on_hang()

    def _end(self, reason: Exception) -> None:
        """End every request with an error, including those of commands that have not run yet."""
        events = self._engine.fail(reason)
        self._ended = True
        self._run_commands()
        if events:
            self._deliver(WorkerMessage(events=tuple(events)))

    def _deliver_news(self, events: list[OutputEvent], *, with_load: bool = False) -> None:
        """Deliver a step's events, the changes of the prefix index, and the worker's load if it is due or `with_load` is set.

        The load is also delivered if a prompt was completed or a request ended in the step. Otherwise a router would know of that
        event, and still count the prompt's tokens as waiting.
        """
        kv, load, now_s = self._engine.scheduler.cache.changes.take(), None, time.monotonic()
        taken: list[str] = []
        with_load = with_load or any(event.usage is not None or event.finish_reason is not None for event in events)
        if with_load or now_s - self._load_at_s > LOAD_PERIOD_S:
            load, self._load_at_s = self._engine.load(), now_s
            taken, self._taken = self._taken, []
        if events or kv is not None or load is not None:
            self._deliver(WorkerMessage(events=tuple(events), kv=kv, load=load, taken=tuple(taken)))

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._inbox.popleft()
            except IndexError:
                break
            command()
        if self._ended:
            self._arrivals.flush()

    def _add(self, group: Group, request: Request) -> ErrorInfo | None:
        """Give the engine one request of a group; return the error of a refused one."""
        is_fetched = request.request_id in group.fetched
        try:
            self._engine.add(request, arrival_s=group.arrival_s, is_held=is_fetched, awaits_group=group.is_held)
        except Exception as error:  # any error at the admission of a request is that request's error alone
            if not isinstance(error, TransomError):
                logger.exception("A request could not be admitted.", extra={"request_id": request.request_id})
            self._engine.events.refused(error)
            return ErrorInfo.of(error)
        return None

    def _end_group(self, group: Group) -> None:
        """Let the requests of a complete group run, or drop them all if one was refused."""
        request_ids = [request.request_id for request in group.requests if request.request_id not in group.aborted]
        if any(group.results):
            for request_id, result in zip((one.request_id for one in group.requests), group.results, strict=True):
                if result is None and request_id not in group.aborted:
                    self._engine.abort(request_id)
        else:
            if group.is_held:
                self._engine.end_group(request_ids)
            self._taken += request_ids
        group.future.set_result(group.results)

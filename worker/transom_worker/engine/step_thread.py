"""`StepThread`: a thread that makes an engine and runs its steps for a caller that waits: a step that hangs becomes an error.

A caller cannot interrupt its own call into native code. So offline use runs every step here, and the caller waits for the
result; it wakes up now and then and looks whether the step is overdue (`step_watchdog`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from transom_core.contract import OutputEvent
from transom_worker.engine.engine import Engine
from transom_worker.engine.step_watchdog import Turns, log_hang, new_turns

CLOSE_TIMEOUT_S = 30.0  # for the end of a step that an interrupted caller has left

T = TypeVar("T")


class StepThread:
    """Runs one call after the other. One thread makes the calls, and it alone uses the engine between them."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], object]] | None] = SimpleQueue()
        self._running: Future[list[OutputEvent]] | None = None  # a step that a caller, who was interrupted, has left
        self._turns: Turns | None = None
        self.is_hung = False  # a step hung, and still may
        self._thread = threading.Thread(target=self._run, name="transom-engine", daemon=True)
        self._thread.start()

    def make(self, build: Callable[[], Engine]) -> Engine:
        """Return the engine that `build` makes on the thread: the OpenMP threads of loading are then those of the steps."""
        try:
            engine = self._call(build).result()
        except BaseException:
            self.close()
            raise
        self._turns = new_turns(engine.config.ranks, lambda: engine.is_restarting)
        return engine

    def step(self, engine: Engine) -> list[OutputEvent]:
        """Run a step of the engine, and return its events.

        An interrupt of the caller leaves the step running; `settle` waits for its end.

        Raises:
            EngineDead: the step hangs. The engine has ended, and must not be used any more.
        """
        self.settle(engine)
        self._running = self._call(engine.step)
        return self._result(engine)

    def settle(self, engine: Engine) -> None:
        """Wait for the end of a step that an interrupted caller has left; its events are lost.

        Raises:
            EngineDead: the step hangs.
        """
        if self._running is not None and not self.is_hung:
            self._result(engine)

    def close(self) -> None:
        """End the thread, and wait for that unless it hangs: a thread that ends with the interpreter may abort it. Idempotent."""
        self._calls.put(None)
        if not self.is_hung:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _result(self, engine: Engine) -> list[OutputEvent]:
        assert self._running is not None
        assert self._turns is not None
        while not wait([self._running], self._turns.period_s).done:
            if (error := self._turns.overdue()) is not None:
                log_hang(error)
                self.is_hung = True
                engine.executor.interrupt()
                engine.fail(error)
                raise error
        ended, self._running = self._running, None
        return ended.result()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, function))
        return future

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if self._turns is not None:
                self._turns.begin()
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            finally:
                if self._turns is not None:
                    self._turns.end()
            del call, future, function

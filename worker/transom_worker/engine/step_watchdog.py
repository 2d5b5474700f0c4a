"""`Watchdog`: notices if the thread that runs an engine's steps hangs, in a step or between two.

- **turn**: one pass of the step loop: commands, a step, and the delivery of its events. A turn begins and ends on the thread that
  runs the steps; while that thread waits for work there is no turn.
- **look**: the watchdog's thread checks the present turn in regular periods.
- **overdue**: a turn that has taken longer than `--step-timeout-s`. Ranks in processes of their own are watched by their executor
  first, which ends a rank that hangs; with such ranks a turn is overdue only `RANKS_GRACE_S` later.

Three things take long without being a hang:

- The ranks are restarted. Their executor has its own limits for that, and the time does not count here.
- A kernel is compiled, as the first step of a new shape may do. If the Python stack of the thread is inside a compiler when the
  turn becomes overdue, the turn may go on for `COMPILE_LIMIT_S` at most.
- The whole process was stopped, by SIGSTOP or because the machine was suspended. A look that comes much too late counts as at most
  two periods.

A thread notices only hangs that let other Python threads run. Against a hang that holds the GIL, `Watchdog` sets a timer outside of
Python (`faulthandler`) anew at every look. If no look comes in time, the timer writes the stacks of all threads and ends the
process.
"""

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable

from transom_core.config import RanksConfig
from transom_core.errors import EngineDead

logger = logging.getLogger("transom.worker")

RANKS_GRACE_S = 30.0
COMPILE_LIMIT_S = 600.0
LONGEST_PERIOD_S = 10.0  # between two looks
LOOKS_PER_TIMEOUT = 8  # so a hang is noticed at most 1/8 of the timeout late
STANDARD_ERROR = 2  # file descriptor
COMPILERS = ("/numba/core/", "/llvmlite/", "/triton/compiler/")  # in the path of a function that compiles kernels
HUNG = "The worker hangs: a step has taken longer than {timeout_s:g} s (--step-timeout-s)."


class Turns:
    """Measures the turns of one thread. That thread calls `begin` and `end`; the watchdog's thread calls `overdue`."""

    def __init__(
        self, config: RanksConfig, *, is_starting: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`is_starting` returns whether the present turn starts ranks, so that its time does not count; `clock` is monotonic."""
        self.limit_s = config.step_timeout_s + (RANKS_GRACE_S if config.size > 1 else 0.0)  # how long a turn may take
        self.period_s = min(LONGEST_PERIOD_S, self.limit_s / LOOKS_PER_TIMEOUT)
        self._step_timeout_s = config.step_timeout_s
        self._is_starting = is_starting
        self._clock = clock
        self._thread: int | None = None  # the thread of the present turn; None between two
        self._number = 0
        self._looked_at: int | None = None  # number of the turn that the last look found
        self._last_look_s = 0.0
        self._spent_s = self._compiled_s = 0.0  # time of that turn, as far as looks have seen it

    def begin(self) -> None:
        """Note that a turn begins on the calling thread."""
        self._number += 1
        self._thread = threading.get_ident()

    def end(self) -> None:
        """Note that the turn has ended."""
        self._thread = None

    def overdue(self) -> EngineDead | None:
        """Look at the present turn, and return the error of a thread that hangs. One thread calls this every `period_s`."""
        thread, number, now_s = self._thread, self._number, self._clock()
        # A longer time means that the whole process was stopped in between.
        elapsed_s = min(now_s - self._last_look_s, 2 * self.period_s)
        self._last_look_s = now_s
        if thread is None or number != self._looked_at:
            self._looked_at, self._spent_s, self._compiled_s = (None if thread is None else number), 0.0, 0.0
            return None
        if self._is_starting():
            return None
        if self._spent_s + elapsed_s >= self.limit_s and self._compiled_s < COMPILE_LIMIT_S and _compiles(thread):
            self._compiled_s += elapsed_s
            return None
        self._spent_s += elapsed_s
        if self._spent_s < self.limit_s:
            return None
        return EngineDead(HUNG.format(timeout_s=self._step_timeout_s), loss_cause="hung")


class Watchdog:
    """A thread that looks at turns. When a turn is overdue, it calls `on_hang` on its own thread, and ends.

    With `ends_process` it also ends the process if the GIL is held for longer than a turn may take. The timer for that belongs to
    the whole process, so only one watchdog in a process may use it.
    """

    def __init__(self, turns: Turns, on_hang: Callable[[EngineDead], None], *, ends_process: bool) -> None:
        self._turns, self._on_hang, self._ends_process = turns, on_hang, ends_process
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transom-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._set_timer()  # the first step may hang before the first look
        self._thread.start()

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._turns.period_s):
                self._set_timer()
                if (error := self._turns.overdue()) is not None:
                    logger.error("%s The stacks of all threads follow.", error)
                    faulthandler.dump_traceback(STANDARD_ERROR)
                    self._on_hang(error)
                    return
        finally:
            if self._ends_process:
                faulthandler.cancel_dump_traceback_later()

    def _set_timer(self) -> None:
        if self._ends_process:
            timeout_s = self._turns.limit_s + 2 * self._turns.period_s
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=STANDARD_ERROR)  # instead of the last one


def _compiles(thread: int) -> bool:
    """Return whether the Python stack of a thread is inside a compiler of kernels."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if any(compiler in frame.f_code.co_filename for compiler in COMPILERS):
            return True
        frame = frame.f_back
    return False

"""A thread that hangs in a step is given up in the step timeout: restarts, compilers and late looks are no hangs."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine_driver import WAIT_S, OnThread, make_hooked_engine, make_request
from transom_core.config import RanksConfig
from transom_worker.engine import step_watchdog
from transom_worker.engine.step_watchdog import COMPILE_LIMIT_S, RANKS_GRACE_S, Turns
from transom_worker.simulate.replay import VirtualClock

TIMEOUT_S = 80.0
PERIOD_S = 10.0


class Looks:
    """The looks at the turns of the test's own thread, one each `PERIOD_S` of a clock that the test moves."""

    def __init__(self, *, num_ranks: int = 1) -> None:
        self.clock, self.is_starting = VirtualClock(), False
        config = RanksConfig(size=num_ranks, step_timeout_s=TIMEOUT_S)
        self.turns = Turns(config, is_starting=lambda: self.is_starting, clock=self.clock)
        assert self.turns.period_s == PERIOD_S

    def first_hang(
        self, num_looks: int, *, between: Callable[[], object] = lambda: None, pause_s: float = PERIOD_S
    ) -> int | None:
        """Look `num_looks` times; return which look found a hang, if one did."""
        for number in range(num_looks):
            self.clock.advance(pause_s)
            between()
            if self.turns.overdue() is not None:
                return number
        return None


def test_a_turn_that_takes_too_long() -> None:
    looks = Looks()
    assert looks.first_hang(50) is None  # no turn
    looks.turns.begin()
    assert looks.first_hang(50) == TIMEOUT_S / PERIOD_S
    error = looks.turns.overdue()
    assert error is not None
    assert error.loss_cause == "hung"
    assert "80 s (--step-timeout-s)" in str(error)


def test_turns_that_follow_each_other_are_no_hang() -> None:
    looks = Looks()
    looks.turns.begin()
    assert looks.first_hang(50, between=looks.turns.begin) is None
    looks.turns.end()
    assert looks.first_hang(50) is None


def test_ranks_are_watched_by_their_executor_first() -> None:
    looks = Looks(num_ranks=2)
    looks.turns.begin()
    assert looks.first_hang(50) == (TIMEOUT_S + RANKS_GRACE_S) / PERIOD_S


def test_a_restart_of_ranks_does_not_count() -> None:
    looks = Looks()
    looks.turns.begin()
    assert looks.first_hang(6) is None
    looks.is_starting = True
    assert looks.first_hang(100) is None
    looks.is_starting = False
    assert looks.first_hang(50) == 2


def test_a_process_that_was_stopped_does_not_hang() -> None:
    """After SIGSTOP, or on a machine that was suspended, the first look comes late."""
    looks = Looks()
    looks.turns.begin()
    assert looks.first_hang(1) is None
    assert looks.first_hang(1, pause_s=100 * TIMEOUT_S) is None
    assert looks.first_hang(50) is not None


def test_a_compiler_may_take_longer_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks()
    monkeypatch.setattr(step_watchdog, "COMPILERS", ("/test_step_watchdog.py",))  # this module is on the stack
    looks.turns.begin()
    assert looks.first_hang(500) == (TIMEOUT_S + COMPILE_LIMIT_S) / PERIOD_S


class Hanging(OnThread):
    """An engine on its thread, of which a step waits until the test ends."""

    def __init__(self, model: Path, step_timeout_s: float) -> None:
        engine, self.executor = make_hooked_engine(str(model), step_timeout_s=step_timeout_s)
        self.entered, self.release, self.hung = threading.Event(), threading.Event(), threading.Event()
        super().__init__(engine, on_hang=self.hung.set)

    def hang(self) -> None:
        self.entered.set()
        assert self.release.wait(WAIT_S)


@pytest.fixture
def hanging(tiny_model: Path) -> Iterator[Hanging]:
    hanging = Hanging(tiny_model, step_timeout_s=1.0)
    yield hanging
    hanging.release.set()
    hanging.thread.shutdown()


@pytest.mark.parametrize("where", ["step", "between steps"])
def test_requests_of_a_thread_that_hangs_end_with_an_error(hanging: Hanging, where: str) -> None:
    """In the executor, as in a synchronisation of a device, or in a command between two steps."""
    if where == "step":
        hanging.executor.before_step = hanging.hang
    assert hanging.submit(make_request("r", [5, 6], max_tokens=1000)) == [None]
    if where != "step":
        hanging.thread.call(hanging.hang)
    assert hanging.entered.wait(WAIT_S)
    event = hanging.last_event("r")
    assert event.error is not None
    assert (event.error.kind, event.error.loss_cause) == ("EngineDead", "hung")
    assert hanging.hung.wait(WAIT_S)
    assert "hangs" in str(hanging.thread.dead)
    (late,) = hanging.submit(make_request("late", [5]))
    assert late is not None
    assert late.kind == "EngineDead"
    hanging.thread.shutdown()  # does not wait for the thread
    hanging.release.set()  # what the thread does now has no effect
    hanging.thread._thread.join(WAIT_S)
    assert not hanging.thread._thread.is_alive()
    assert not hanging.engine.requests

"""An engine whose executor loses a rank: every request gets an error, and the engine serves again, or ends where it cannot.

A thread that hangs in a step is given up in the step timeout: restarts, compilers and late looks are no hangs.
"""

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.engine_driver import WAIT_S, OnThread, make_engine, make_hooked_engine, make_request, run
from tests.present import present
from tests.worker.conftest import Start
from transom_core.config import EngineConfig, RanksConfig
from transom_core.contract import WorkerMessage
from transom_core.errors import ConfigError, EngineDead, RankLost, WorkerLost
from transom_worker import LLM, SamplingParams
from transom_worker.engine import startup, step_watchdog
from transom_worker.engine.engine import Engine
from transom_worker.engine.engine_thread import EngineThread
from transom_worker.engine.step_watchdog import COMPILE_LIMIT_S, RANKS_GRACE_S, Turns
from transom_worker.execution.executor import ExecutorInfo
from transom_worker.execution.local_executor import LocalExecutor
from transom_worker.scheduling.step import StepResult
from transom_worker.simulate.replay import VirtualClock

PROMPT = list(range(5, 45))
TIMEOUT_S = 80.0
PERIOD_S = 10.0


class Fragile(LocalExecutor):
    """One rank that can be lost like several."""

    lose_after: int | None = None  # results
    restarts = 0
    refusal: Exception | None = None  # of a restart
    on_loss: Callable[[], None] = staticmethod(lambda: None)
    is_lost = False
    always_loses = False
    num_shutdowns = 0
    before_restart: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.interrupted = threading.Event()

    def receive(self) -> StepResult:
        if self.always_loses:
            raise RankLost("Rank 1 of 2: out of memory")
        if self.lose_after is not None:
            if self.lose_after == 0:
                self.lose_after = None
                raise RankLost("Rank 1 of 2: it was killed by SIGKILL")
            self.lose_after -= 1
        return super().receive()

    @property
    def lost(self) -> bool:
        return self.is_lost

    def check(self) -> None:
        if self.is_lost:
            raise RankLost("Rank 0 of 2: it ended")

    def on_lost(self, callback: Callable[[], None]) -> None:
        self.on_loss = callback

    def interrupt(self) -> None:
        self.interrupted.set()

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        super().shutdown()

    def restart(self) -> ExecutorInfo:
        self.restarts += 1
        self.before_restart()
        self.is_lost = False
        if self.refusal is not None:
            raise self.refusal
        self.shutdown()
        return self.start()


@pytest.fixture
def fragile_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "create_executor", Fragile)


@pytest.fixture(params=[1, 2])
def engine(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = make_engine(str(tiny_model), executor=Fragile, steps_in_flight=request.param, max_num_seqs=2)
    yield engine
    engine.shutdown()


def executor_of(engine: Engine) -> Fragile:
    executor = engine.executor
    assert isinstance(executor, Fragile)
    return executor


def test_every_request_gets_an_error_and_can_run_again(engine: Engine) -> None:
    requests = [make_request(f"r{i}", PROMPT, max_tokens=6) for i in range(4)]  # two run, two wait
    expected = [whole.token_ids for whole in run(engine, requests)]
    for request in requests:
        engine.add(request)
    executor_of(engine).lose_after = 2
    events = engine.step()
    engine.publish()
    while not engine.is_restarting:
        events = engine.step()
    page = engine.metrics.text().decode()  # which is not published again before the ranks have started
    for state in ("running", "waiting"):
        assert re.search(rf"^transom_requests_{state}(\{{.*\}})? 0(\.0)?$", page, re.MULTILINE)
    errors = {event.request_id: event.error for event in events if event.error}
    assert set(errors) == {"r0", "r1", "r2", "r3"}
    assert {error.kind for error in errors.values()} == {"WorkerLost"}
    assert all("killed by SIGKILL" in error.message for error in errors.values())
    stats = engine.scheduler.stats()
    assert sum(group.active_blocks + group.cached_blocks for group in stats.groups) == 0  # what ranks held is gone
    assert engine.load().num_running == engine.load().num_waiting == 0
    with pytest.raises(WorkerLost, match="again"):
        engine.add(make_request("early", PROMPT))
    assert engine.has_work
    assert engine.step() == []
    assert [whole.token_ids for whole in run(engine, requests)] == expected
    assert executor_of(engine).restarts == 1


@pytest.mark.parametrize("refusal", [RankLost("no memory"), ConfigError("no memory for all ranks")])
def test_ranks_that_do_not_start_again_end_the_engine(engine: Engine, refusal: Exception) -> None:
    engine.add(make_request("r", PROMPT))
    executor = executor_of(engine)
    executor.lose_after, executor.refusal = 0, refusal
    engine.step()
    engine.step()
    assert engine.dead is refusal
    with pytest.raises(EngineDead, match="no memory"):
        engine.add(make_request("late", PROMPT))
    assert not engine.is_restarting
    assert not engine.has_work


@pytest.mark.usefixtures("fragile_ranks")
def test_ranks_that_start_again_with_other_files_end_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    """Routers know the worker by the identity that it began with; the worker that replaces it has its own."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    engine = make_engine(str(folder), executor=Fragile)
    engine.add(make_request("r", PROMPT))
    weights = folder / "model.safetensors"

    def change() -> None:
        weights.write_bytes(weights.read_bytes()[:-2] + b"xx")

    executor_of(engine).lose_after, executor_of(engine).before_restart = 0, change
    engine.step()
    engine.step()
    assert isinstance(engine.dead, EngineDead)
    assert "files have changed" in str(engine.dead)
    engine.shutdown()


def test_ranks_that_end_after_their_engine_are_no_work(engine: Engine) -> None:
    """Its thread would never be idle if they were."""
    engine.fail(ValueError("a step failed"))
    executor_of(engine).is_lost = True
    assert not engine.has_work


def test_an_idle_worker_restarts_at_once(engine: Engine) -> None:
    delivered: SimpleQueue[WorkerMessage] = SimpleQueue()
    thread = EngineThread(engine, delivered.put)
    executor = executor_of(engine)
    restarted = threading.Event()
    start = executor.start

    def start_and_tell() -> ExecutorInfo:
        info = start()
        restarted.set()
        return info

    executor.start = start_and_tell  # type: ignore[method-assign]
    executor.is_lost = True
    executor.on_loss()
    assert restarted.wait(WAIT_S)
    thread.shutdown()
    assert executor.restarts == 1


def test_shutdown_does_not_wait_for_a_restart(engine: Engine) -> None:
    executor = executor_of(engine)
    restarting = threading.Event()

    def hang() -> None:
        restarting.set()
        assert executor.interrupted.wait(WAIT_S)
        raise RankLost("The start of the ranks was interrupted.")

    executor.before_restart = hang
    thread = EngineThread(engine, lambda _: None)
    executor.is_lost = True
    executor.on_loss()
    assert restarting.wait(WAIT_S)
    thread.shutdown()
    assert "interrupted" in str(engine.dead)


@pytest.mark.parametrize("fails", ["engine.engine.Scheduler", "engine.startup.startup_report"])
def test_an_engine_that_cannot_be_made_leaves_no_ranks(
    start: Start, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    made: list[Fragile] = []

    def make(config: EngineConfig) -> Fragile:
        made.append(Fragile(config))
        return made[0]

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(f"transom_worker.{fails}", fail)
    with pytest.raises(ValueError, match="a bug"):
        start(executor=make)
    assert made[0].num_shutdowns == 1


@pytest.mark.usefixtures("fragile_ranks")
def test_offline_outputs_continue_after_a_restart(tiny_model: Path) -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=12, logprobs=1, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPT[i:]} for i in range(3)]
    with LLM(str(tiny_model), kv_cache_memory_bytes="8MiB", num_threads=1, max_num_seqs=2) as llm:
        expected = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        executor_of(llm.engine).lose_after = 5
        found = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        assert [(out.token_ids, out.text) for out in found] == [(out.token_ids, out.text) for out in expected]
        assert [len(out.logprobs or ()) for out in found] == [12] * 3
        assert executor_of(llm.engine).restarts == 1


@pytest.mark.usefixtures("fragile_ranks")
def test_an_offline_prompt_that_ends_every_rank_becomes_an_error(tiny_model: Path) -> None:
    with LLM(str(tiny_model), kv_cache_memory_bytes="8MiB", num_threads=1) as llm:
        executor_of(llm.engine).always_loses = True
        with pytest.raises(WorkerLost, match="out of memory"):
            llm.generate({"prompt_token_ids": PROMPT}, use_tqdm=False)
        assert executor_of(llm.engine).restarts in (2, 3)  # the last loss is followed by a restart, too


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


@pytest.mark.parametrize(
    ("num_ranks", "compiles", "limit_s"),
    [(1, False, TIMEOUT_S), (2, False, TIMEOUT_S + RANKS_GRACE_S), (1, True, TIMEOUT_S + COMPILE_LIMIT_S)],
)
def test_a_turn_that_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, compiles: bool, limit_s: float
) -> None:
    """Ranks are watched by their executor first, and a compiler may take longer, but not for ever."""
    looks = Looks(num_ranks=num_ranks)
    if compiles:
        monkeypatch.setattr(step_watchdog, "COMPILERS", ("/test_engine_restart.py",))  # this module is on the stack
    assert looks.first_hang(50) is None  # no turn
    looks.turns.begin()
    assert looks.first_hang(50, between=looks.turns.begin) is None  # turns that follow each other
    looks.turns.begin()
    assert looks.first_hang(500) == limit_s / PERIOD_S
    if not compiles:
        error = present(looks.turns.overdue())
        assert error.loss_cause == "hung"
        assert f"{TIMEOUT_S:.0f} s (--step-timeout-s)" in str(error)
    looks.turns.end()
    assert looks.first_hang(50) is None


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
    error = present(hanging.last_event("r").error)
    assert (error.kind, error.loss_cause) == ("EngineDead", "hung")
    assert hanging.hung.wait(WAIT_S)
    assert "hangs" in str(hanging.thread.dead)
    (late,) = hanging.submit(make_request("late", [5]))
    assert present(late).kind == "EngineDead"
    hanging.thread.shutdown()  # does not wait for the thread
    hanging.release.set()  # what the thread does now has no effect
    hanging.thread._thread.join(WAIT_S)
    assert not hanging.thread._thread.is_alive()
    assert not hanging.engine.requests

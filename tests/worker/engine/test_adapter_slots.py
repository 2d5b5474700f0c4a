"""Requests with LoRA adapters wait for a slot: each computes with its own adapter in it, and none waits for ever."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.adapter_folders import make_adapter, write_adapter
from tests.engine_driver import drain, make_engine, make_request, num_active
from tests.worker.engine.test_engine_restart import Fragile
from transom_core.config import EngineConfig, LoraConfig
from transom_core.contract import Adapter, OutputEvent
from transom_core.errors import RequestError, WorkerLost
from transom_worker.engine.adapter_slots import AdapterSlots, Trial
from transom_worker.engine.engine import Engine
from transom_worker.execution.executor import ExecutorInfo
from transom_worker.scheduling.step import StepPlan


class Slots(Fragile):
    """A rank that only notes which adapter each slot has and each sequence expects."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(replace(config, lora=None))
        self.loaded: dict[int, str] = {}
        self.expected: dict[str, str | None] = {}  # request -> path

    def load_adapter(self, slot: int, path: str) -> None:
        self.loaded.pop(slot, None)
        if path.endswith("broken"):
            raise RequestError("lora_path: q_proj has the wrong shape")
        self.loaded[slot] = path

    def submit(self, plan: StepPlan) -> None:
        for new in plan.new_sequences:
            assert self.loaded.get(new.adapter_slot) == self.expected[new.request_id]
        plan.new_sequences = [replace(new, adapter_slot=-1) for new in plan.new_sequences]
        super().submit(plan)

    def restart(self) -> ExecutorInfo:
        self.loaded.clear()
        return super().restart()

    def reload(self, model: str) -> ExecutorInfo:
        self.loaded.clear()
        return super().reload(model)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    return [make_adapter(tmp_path_factory.mktemp(f"adapter{number}")) for number in range(4)]


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    made = make_engine(str(tiny_model), executor=Slots, enable_lora=True, max_loras=2)
    yield made
    made.shutdown()


def add(engine: Engine, name: str, adapter: Adapter | None, **params: Any) -> None:
    assert isinstance(engine.executor, Slots)
    engine.executor.expected[name] = None if adapter is None else adapter.path
    engine.add(replace(make_request(name, [5, 6, 7, 8], **params), adapter=adapter))


def ends(events: list[OutputEvent]) -> dict[str, str]:
    """Every ended request, with its error's message if it has one."""
    return {one.request_id: one.error.message if one.error else "" for one in events if one.finish_reason}


def test_every_request_computes_with_its_adapter_in_its_slot(engine: Engine, adapters: list[Adapter]) -> None:
    for number in range(12):
        adapter = None if number % 5 == 4 else adapters[number % 5]
        add(engine, str(number), adapter, max_tokens=3 + number)
    assert ends(drain(engine)) == {str(number): "" for number in range(12)}
    stats = engine.adapters.stats()
    assert (stats.num_used, stats.num_idle, stats.num_free, num_active(engine)) == (0, 2, 0, 0)
    assert stats.num_loads >= 4
    assert 'state="idle"' in engine.metrics.text().decode()


def test_a_wrong_adapter_ends_its_own_requests_and_trials(
    engine: Engine, adapters: list[Adapter], tmp_path: Path
) -> None:
    broken, changed = make_adapter(tmp_path / "broken"), make_adapter(tmp_path / "changed")
    write_adapter(tmp_path / "changed", b"other weights")
    trials = [engine.load_adapter(one) for one in (broken, changed, adapters[0])]
    for name, adapter in {"x": broken, "y": broken, "z": changed, "ok": adapters[0], "plain": None}.items():
        add(engine, name, adapter)
    ended = ends(drain(engine))
    assert "'broken' cannot be used: lora_path: q_proj has the wrong shape" in ended["x"] == ended["y"]
    assert "have changed since it was loaded" in ended["z"]
    assert (ended["ok"], ended["plain"]) == ("", "")
    assert [type(trial.exception()) for trial in trials] == [RequestError, RequestError, type(None)]


def test_aborted_requests_give_their_slots_back(engine: Engine, adapters: list[Adapter]) -> None:
    for number, adapter in enumerate(adapters):
        add(engine, str(number), adapter, max_tokens=100)
    while engine.adapters.stats().num_used < 2:
        engine.step()
    assert engine.abort("0")
    assert engine.abort("3")  # it waits
    assert ends(drain(engine)) == {"1": "", "2": ""}


def test_slots_are_loaded_again_for_other_weights_and_forgotten_with_lost_ranks(
    engine: Engine, tiny_model: Path, adapters: list[Adapter]
) -> None:
    assert isinstance(engine.executor, Slots)
    add(engine, "idle", adapters[0])
    drain(engine)
    add(engine, "stream", adapters[1], max_tokens=50)
    while not engine.adapters.stats().num_used:
        engine.step()
    engine.pause("keep")
    while not engine.is_quiet:
        engine.step()
    engine.update_weights(str(tiny_model))
    assert [*engine.executor.loaded.values()] == [adapters[1].path]
    engine.pause(None)
    add(engine, "other", adapters[2], max_tokens=50)
    while engine.adapters.stats().num_used < 2:
        engine.step()
    trial, engine.executor.is_lost = engine.load_adapter(adapters[3]), True
    ended = ends(engine.step())
    assert all("lost a rank" in ended[name] for name in ("stream", "other"))
    assert isinstance(trial.exception(), WorkerLost)
    engine.step()
    assert engine.adapters.stats().num_free == 2
    add(engine, "again", adapters[1])
    assert ends(drain(engine)) == {"again": ""}


def test_a_worker_without_slots_refuses_adapters(tiny_model: Path, adapters: list[Adapter]) -> None:
    engine = make_engine(str(tiny_model))
    with pytest.raises(RequestError, match="--enable-lora"):
        engine.add(replace(make_request("a", [5]), adapter=adapters[0]))
    engine.shutdown()


@given(st.data())
def test_slots_have_one_adapter_and_no_user_waits_for_ever(adapters: list[Adapter], data: st.DataObject) -> None:
    """Users of four adapters come and end in any order, and two of the adapters always get new ones."""
    slots, loaded = AdapterSlots(LoraConfig(max_loras=2), lambda slot, path: loaded.__setitem__(slot, path)), {}
    waiting: dict[Trial, Adapter] = {}
    running: dict[Trial, tuple[int, Adapter]] = {}

    def come(number: int) -> None:
        user: Trial = Future()
        waiting[user] = adapters[number]
        slots.begin(user, adapters[number])

    def take() -> None:
        while slots.is_busy:
            for user, slot, error in slots.take(may_wait=True):
                assert error is None
                assert isinstance(user, Future)
                running[user] = slot, waiting.pop(user)
        assert all(loaded[slot] == adapter.path for slot, adapter in running.values())

    for number in data.draw(st.lists(st.integers(0, 3), max_size=12)):
        come(number)
        take()
        for user in data.draw(st.lists(st.sampled_from([*running, *waiting]), unique=True, max_size=2)):
            slots.remove(user)
            running.pop(user, None)
            waiting.pop(user, None)
    early, rounds = set(waiting), 0
    while early & waiting.keys():
        rounds += 1
        assert rounds <= 40, "a user waits for ever"
        old = [*running]
        come(0)
        come(1)
        take()
        for user in old[: 1 + len(old) // 2]:
            slots.remove(user)
            del running[user]
        take()

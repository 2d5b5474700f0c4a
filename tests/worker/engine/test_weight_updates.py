"""Weights that are replaced while a worker is paused: it answers as a fresh worker would, and hits no block of the old ones."""

import gc
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import prompt
from tests.engine_driver import Whole, drain, make_engine, make_request, num_active, run
from tests.matrices import some_daily
from tests.tiny_checkpoints import tiny_llama
from transom_core.errors import RequestError
from transom_worker.engine.engine import Engine
from transom_worker.execution.executor import ExecutorInfo

SETTINGS: dict[str, Any] = dict(dtype="float32", block_size=8, window=24, window_pattern="SF", steps_in_flight=2)
FIRST, SECOND = prompt(50), prompt(41)
NUM_BEFORE = 5  # tokens of a stream before the update


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("other_model"), seed=1)


@pytest.fixture(scope="module")
def fresh(other_model: Path) -> Iterator[Engine]:
    engine = make_engine(str(other_model), **SETTINGS)
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("num_ranks", some_daily([1, 2], daily=[2]))
def test_an_updated_engine_answers_as_a_fresh_one(
    tiny_model: Path, other_model: Path, fresh: Engine, tmp_path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_model = shutil.copytree(tiny_model, tmp_path / "first")
    engine = make_engine(str(first_model), **SETTINGS, tensor_parallel_size=num_ranks, swap_space="4MiB")
    shutil.rmtree(first_model)  # a trainer keeps its last checkpoints only
    calls, reload = [], engine.executor.reload

    def recorded(model: str) -> ExecutorInfo:
        calls.append("reload")
        return reload(model)

    assert engine.transfer_store is not None
    monkeypatch.setattr(engine.executor, "reload", recorded)
    monkeypatch.setattr(engine.transfer_store, "end_reads", lambda: calls.append("end_reads"))
    run(engine, [make_request("cached", SECOND)])
    old_identity, stream = engine.info.identity, Whole()
    engine.add(make_request("stream", FIRST))
    while len(stream.token_ids) < NUM_BEFORE:
        for event in engine.step():
            stream.add(event, first_position=0)
    with pytest.raises(RequestError, match="pause it first"):
        engine.update_weights(str(other_model))
    engine.pause("keep")
    while not engine.is_quiet:
        for event in engine.step():
            stream.add(event, first_position=0)
    with pytest.raises(RequestError, match="another architecture"):
        engine.update_weights(str(tiny_llama(tmp_path / "other", layers=2)))
    before = list(stream.token_ids)
    engine.update_weights(str(other_model))
    assert calls == ["reload", "end_reads"]  # reads end when the old memory is free
    assert engine.step() == []
    assert engine.blocked_s > 0
    assert engine.scheduler.cache.identity == engine.info.identity == fresh.info.identity != old_identity
    assert not any(blocks.digests for blocks in engine.scheduler.cache.changes.whole().runs)
    engine.pause(None)
    for event in drain(engine):
        stream.add(event, first_position=0)
    (resumed,) = run(fresh, [make_request(f"stream{num_ranks}", FIRST, resumed=before)])
    assert stream.token_ids == [*before, *resumed.token_ids]
    (first, again), (expected,) = (
        [run(engine, [make_request(name, SECOND)])[0] for name in ("first", "again")],
        run(fresh, [make_request(f"second{num_ranks}", SECOND)]),
    )
    assert first.token_ids == again.token_ids == expected.token_ids
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 40)
    assert num_active(engine) == 0
    engine.shutdown()


def test_what_is_frozen_stays_frozen_without_the_old_model(tiny_model: Path, other_model: Path) -> None:
    """A worker freezes its objects after its start, so that no garbage collection visits them (`host_memory`)."""
    engine = make_engine(str(tiny_model), **SETTINGS)
    old = weakref.ref(engine.executor._runner)  # type: ignore[attr-defined]
    gc.freeze()
    engine.pause("keep")
    engine.update_weights(str(other_model))
    assert (old(), gc.get_freeze_count() > 0) == (None, True)
    engine.shutdown()


def test_a_pause_that_waits_lets_requests_end_and_holds_later_ones(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model), **SETTINGS)
    engine.add(make_request("before", FIRST))
    engine.pause("wait")
    engine.add(make_request("later", SECOND))
    assert not engine.is_quiet
    events = drain(engine)
    assert {event.request_id for event in events} == {"before"}
    assert events[-1].finish_reason
    assert engine.is_quiet
    engine.pause(None)
    assert {event.request_id for event in drain(engine)} == {"later"}

"""Full garbage collections of a worker's process run at idle moments, not during steps."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_driver import WAIT_S, OnThread, make_engine, make_request
from transom_worker.engine import full_collections
from transom_worker.engine.full_collections import AFTER_COLLECTIONS, NEVER, FullCollections


@pytest.fixture
def collections() -> Iterator[FullCollections]:
    thresholds = gc.get_threshold()
    gc.collect()
    yield FullCollections(by_engine=True)
    gc.set_threshold(*thresholds)


def collect_young() -> None:
    for _ in range(AFTER_COLLECTIONS):
        gc.collect(1)


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "busy for long"])
def test_the_engines_thread_collects(
    tiny_model: Path, collections: FullCollections, monkeypatch: pytest.MonkeyPatch, is_idle: bool
) -> None:
    assert gc.get_threshold()[2] == NEVER  # by itself Python collects nothing whole any more
    collected, run = threading.Event(), collections.run

    def noted() -> None:
        run()
        collected.set()

    monkeypatch.setattr(collections, "run", noted)
    harness = OnThread(make_engine(str(tiny_model)))
    try:
        harness.thread._collections = collections
        if not is_idle:
            monkeypatch.setattr(full_collections, "BUSY_S", 0.0)
            monkeypatch.setattr("transom_worker.engine.engine_thread.IDLE_S", WAIT_S)
        assert not collections.is_due
        collect_young()
        harness.submit(make_request("wakes it", [5], max_tokens=1))
        assert collected.wait(WAIT_S)
        assert harness.last_event("wakes it").finish_reason == "length"
    finally:
        harness.thread.shutdown()

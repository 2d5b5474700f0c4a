"""A worker's only rank in a process of its own (`--rank-process`): the same tokens and identity, failures, metrics."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_driver import drain, make_engine, make_request, run
from tests.tiny_checkpoints import reference_greedy
from tests.worker.ranks.rank_watch import left_behind, process_ids, wait_until_gone
from transom_core.errors import RankLost
from transom_core.settings.settings import Settings
from transom_worker.engine.engine import Engine
from transom_worker.execution.ranks import process_launcher

PROMPTS = [[(31 * i + 17 * j) % 1900 + 40 for j in range(length)] for i, length in enumerate((40, 130, 7))]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = make_engine(
        str(tiny_model), device="cpu", rank_process=True, steps_in_flight=2, swap_space="8MiB", step_timeout_s=600
    )
    yield engine
    engine.shutdown()
    assert not left_behind(os.getpid())


def test_it_gives_what_a_rank_in_the_engines_process_gives(engine: Engine, tiny_model: Path) -> None:
    requests = [make_request(f"r{i}", prompt, max_tokens=9, logprobs=2) for i, prompt in enumerate(PROMPTS)]
    here = make_engine(str(tiny_model), device="cpu", steps_in_flight=2, swap_space="8MiB", num_threads=1)
    try:
        in_process, own = run(here, requests), run(engine, requests)
        assert [one.token_ids for one in own] == [reference_greedy(tiny_model, prompt, 9) for prompt in PROMPTS]
        assert [one.logprobs for one in own] == [one.logprobs for one in in_process]
        assert engine.info.identity == here.info.identity
        assert engine.info.disk_fingerprint == here.info.disk_fingerprint
        before_compiling = [one.report.split(" (compiling")[0] for one in (engine, here)]  # the first to start compiles
        assert before_compiling[0] == before_compiling[1]
        assert (engine.info.memory.device, engine.info.memory.kv_bytes) == ("cpu", here.info.memory.kv_bytes)
    finally:
        here.shutdown()
    (report,) = engine.executor.rank_reports()
    assert report.usage.busy_s > 0
    assert report.info.process_id != os.getpid()


@pytest.mark.parametrize("is_met_by_a_call", [False, True])
def test_its_loss_costs_a_restart(engine: Engine, tiny_model: Path, is_met_by_a_call: bool) -> None:
    """Also if a call between two steps meets the loss, for a prefix that moves, and no request runs."""
    engine.add(make_request("lost", PROMPTS[0]), is_held=is_met_by_a_call)
    engine.step()
    (process_id,) = process_ids(engine)
    os.kill(process_id, signal.SIGKILL)
    if is_met_by_a_call:
        while not engine.executor.lost:
            time.sleep(0.001)
        with pytest.raises(RankLost):
            engine.executor.take_read_ends()
    (event,) = [event for event in drain(engine) if event.error is not None]
    assert event.error is not None
    assert event.error.kind == "WorkerLost"
    assert event.error.loss_cause == "killed"
    wait_until_gone(process_id)
    assert not engine.is_restarting
    (whole,) = run(engine, [make_request("after", PROMPTS[0], max_tokens=5)])
    assert whole.token_ids == reference_greedy(tiny_model, PROMPTS[0], 5)


def test_the_process_sees_the_gpus_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may have granted it one of several, or a part of one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-part-3")
    config = Settings.parse(model="m", device="cuda").engine_config()
    assert process_launcher._environments(config, 1)[0]["CUDA_VISIBLE_DEVICES"] == "MIG-part-3"

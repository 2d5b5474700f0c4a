"""Ranks as Ray actors: in the placement group of the actor that owns them, killed and started again, gone with it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tests.tiny_checkpoints import reference_greedy
from tests.worker.ranks.rank_watch import wait_until_gone

pytestmark = [pytest.mark.exhaustive, pytest.mark.serve, pytest.mark.timeout(900)]

PROMPTS = [[(31 * i + 17 * j) % 1900 + 40 for j in range(length)] for i, length in enumerate((40, 7))]
NUM_TOKENS = 8
ROOT = Path(__file__).parents[3]
NUM_RANKS = 2
STEP_TIMEOUT_S = 6.0  # a rank that only waits for a core is not to be taken for one that hangs


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    for attempt in range(3):
        try:
            start_ray()
            break
        except Exception as error:  # Ray gives its own processes 30 s, of which a full machine may make too little
            ray.shutdown()
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
    yield
    ray.shutdown()


def start_ray() -> None:
    """A private one, whose actors find what tests import."""
    ray.init(
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )


class Owner:
    """An engine over Ray ranks, as a Serve replica has it."""

    def __init__(self, model: str) -> None:
        from transom_core.settings.settings import Settings
        from transom_worker.engine.startup import build_engine

        config = Settings.parse(
            model=model,
            device="cpu",
            tensor_parallel_size=NUM_RANKS,
            kv_cache_memory_bytes="8MiB",
            num_threads=1,
            step_timeout_s=STEP_TIMEOUT_S,
        ).engine_config()
        self.engine = build_engine(replace(config, ranks=replace(config.ranks, launcher="ray")))

    def answers(self, name: str) -> list[list[int]]:
        from tests.engine_driver import make_request, run

        requests = [make_request(f"{name}-{i}", p, max_tokens=NUM_TOKENS) for i, p in enumerate(PROMPTS)]
        return [whole.token_ids for whole in run(self.engine, requests)]

    def rank_processes(self) -> list[int]:
        from tests.worker.ranks.rank_watch import process_ids

        return process_ids(self.engine)

    def lose(self, pid: int) -> list[str]:
        """Kill a rank while idle; what `step` says of it, and the restart."""
        import threading

        from tests.engine_driver import make_request

        lost = threading.Event()
        self.engine.executor.on_lost(lost.set)
        self.engine.add(make_request("lost", PROMPTS[0], max_tokens=NUM_TOKENS))
        os.kill(pid, signal.SIGKILL)
        assert lost.wait(120)
        return self.errors_and_restart()

    def stop(self, pid: int) -> list[str]:
        """Stop a rank; what `step` says of it once its time is over, and the restart."""
        from tests.engine_driver import make_request

        self.engine.add(make_request("stopped", PROMPTS[0], max_tokens=NUM_TOKENS))
        os.kill(pid, signal.SIGSTOP)
        return self.errors_and_restart()

    def errors_and_restart(self) -> list[str]:
        events = self.engine.step()
        assert self.engine.is_restarting
        self.engine.step()
        return [event.error.message for event in events if event.error]


def start(model: Path, group: PlacementGroup) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    return ray.remote(Owner).options(num_cpus=0.1, scheduling_strategy=strategy).remote(str(model))


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    return [reference_greedy(tiny_model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def test_ranks_in_the_group_of_their_owner(cluster: None, tiny_model: Path, expected: list[list[int]]) -> None:
    group = placement_group([{"CPU": 0.1}, {"CPU": 0.5}, {"CPU": 0.5}], strategy="PACK")
    owner = start(tiny_model, group)
    assert ray.get(owner.answers.remote("first")) == expected
    launched = ray.get(owner.rank_processes.remote())
    (told,) = ray.get(owner.lose.remote(launched[1]))
    assert "lost a rank" in told
    wait_until_gone(*launched)
    assert ray.get(owner.answers.remote("again")) == expected
    again = ray.get(owner.rank_processes.remote())
    (told,) = ray.get(owner.stop.remote(again[1]))
    assert re.search("Rank 1 .*was not ready within", told)
    wait_until_gone(*again)
    again = ray.get(owner.rank_processes.remote())
    ray.kill(owner)
    wait_until_gone(*again)
    remove_placement_group(group)

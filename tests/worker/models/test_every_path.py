"""Every family preempted, by swap and by recomputing; with prefixes on the host and in files.

`end_to_end/test_combinations.py` has the same with everything else on, for a model of each kind of cache.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine_driver import run
from tests.matrices import some_daily
from tests.worker.models.family_tests import Family, asked
from tests.worker.models.test_moe_families import ALL_CASES, make_family
from transom_worker.scheduling import fair_preemption

WHICH = (3, 3, 2, 3, 3, 1)  # prompts, by length
# Longest requests that the pool has room for: 1.25, unless blocks of a group are large beside a request.
ROOM = {"deepseek_v4": 2.6} | dict.fromkeys(
    ("granitemoehybrid", "jamba", "kimi_linear", "bailing_hybrid", "nemotron_h"), 1.7
)


@pytest.fixture(scope="module", params=some_daily([*ALL_CASES, "deepseek_v4"], daily=["deepseek_v32"]))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("tiers"), request.param)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_and_back_from_host_and_disk(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Clients take their turns in a pool that is too small; then hits come from the tiers, in the end from files alone."""
    monkeypatch.setattr(fair_preemption, "SLICE_STEPS", 4)
    pool = int(family.engine().info.plan.request_bytes * ROOM.get(family.case.family, 1.25))
    tiers = {"swap_space": "1MiB", "disk_cache": str(tmp_path), "disk_space": "64MiB", "preemption_mode": mode}
    settings = {"kv_cache_memory_bytes": pool, "max_num_batched_tokens": 45, "max_num_seqs": 3, "device": "cpu"}
    engine = family.engine(**settings, **tiers)
    for name in ("cold", "hit"):
        requests = [asked(f"{name}{at}", family.answers[i].prompt) for at, i in enumerate(WHICH)]
        wholes = run(engine, [replace(request, client=str(at % 2)) for at, request in enumerate(requests)])
        family.check(name, wholes, WHICH)
    work = engine.scheduler.work
    assert sum(engine.scheduler.cache.tiers.loads.num_loaded) > 0
    assert (work.num_swaps if mode == "swap" else work.num_preemptions - work.num_swaps) > 0
    engine.shutdown()
    again = family.engine(**settings, **tiers)
    (whole,) = family.ask(again, "from files", [3])
    assert whole.num_cached_tokens > 0
    again.shutdown()

"""DeepSeek V4 through the engine against transformers: the tests that every family runs."""

from __future__ import annotations

import pytest

from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from tests.worker.models.family_tests import Family, FamilyCase, FamilyTests, SmallPoolTests

MISTAKES = (
    {"sliding_window": 15},
    {"index_topk": 4},
    {"hc_sinkhorn_iters": 1},
    {"swiglu_limit": 2.5},
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = make_deepseek_v4(tmp_path_factory.mktemp("deepseek_v4"))
    return Family.of(folder, FamilyCase(family="deepseek_v4", mistakes=MISTAKES))


class TestDeepseekV4(FamilyTests):
    """All of `FamilyTests`."""

    records = False  # what its compressed layers read in a step is chosen with the host's help


class TestDeepseekV4InSmallPools(SmallPoolTests):
    """All of `SmallPoolTests`."""

    def test_preempted(self, family: Family) -> None:
        """Entries take little: the pool must be smaller than other families' before the scheduler preempts a sequence."""
        few = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
        plan = family.engine(**few).info.plan
        engine = family.engine(kv_cache_memory_bytes=2 * plan.request_bytes, **few)
        family.ask(engine, "tight", [3, 2, 3, 1, 3])
        assert engine.scheduler.work.num_preemptions > 0

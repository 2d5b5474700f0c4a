"""The rivals do what their names say, on the real cache."""

from __future__ import annotations

import pytest

from eviction_policies import POLICIES
from transom_worker.config import SchedulerConfig
from transom_worker.kvcache.groups import GroupKind, GroupSpec
from transom_worker.kvcache.layout import ArenaLayout, GroupLayout
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.simulate.arrivals import SequentialArrivals
from transom_worker.simulate.replay import Replay
from transom_worker.simulate.virtual_time import StepCost, VirtualClock
from transom_worker.simulate.workload import Run, SimulatedRequest, TokenSpace, Workload

UNIT = 16
PROMPT_UNITS = 4


def hit_tokens(policy: str, prompts: list[Run], *, num_prompts_in_pool: int) -> int:
    """Of prompts with answers of one token, one at a time, on a model with one full group."""
    spec = GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=UNIT)
    group = GroupLayout(spec=spec, block_bytes=256, stride_bytes=256, layers=())
    layout = ArenaLayout(page_bytes=256, num_pages=(num_prompts_in_pool + 1) * PROMPT_UNITS, groups=(group,))
    space = TokenSpace()
    space.take(1_000_000)
    requests = tuple(SimulatedRequest(prompt=(prompt,), answer=space.take(1)) for prompt in prompts)
    workload = Workload(name="test", requests=requests)
    scheduler = Scheduler(
        SchedulerConfig(),
        layout,
        block_size=UNIT,
        max_model_len=4_096,
        enable_prefix_caching=True,
        policy=POLICIES[policy](),
    )
    replay = Replay(scheduler, workload, SequentialArrivals(workload), cost=StepCost(), clock=VirtualClock())
    assert replay.run().requests == len(prompts)
    outcome = scheduler.stats().outcome_tokens
    assert sum(outcome.values()) == sum(prompt.num_tokens for prompt in prompts)
    return outcome.get("hit", 0)


def one_hot_prompt_in_a_scan(*, scan: int) -> list[Run]:
    space = TokenSpace()
    hot = space.take(PROMPT_UNITS * UNIT)
    prompts = [hot, hot]
    for _ in range(12):
        prompts += [*(space.take(PROMPT_UNITS * UNIT) for _ in range(scan)), hot]
    return prompts


@pytest.mark.parametrize("policy", POLICIES)
def test_what_fits_is_hit(policy: str) -> None:
    prompts = one_hot_prompt_in_a_scan(scan=2)
    assert hit_tokens(policy, prompts, num_prompts_in_pool=40) == 13 * (PROMPT_UNITS - 1) * UNIT


def test_recency_loses_a_hot_prompt_to_a_scan_and_the_others_keep_it() -> None:
    prompts = one_hot_prompt_in_a_scan(scan=9)
    hits = {policy: hit_tokens(policy, prompts, num_prompts_in_pool=6) for policy in POLICIES}
    most = 13 * (PROMPT_UNITS - 1) * UNIT
    assert hits.pop("lru") == (PROMPT_UNITS - 1) * UNIT
    for policy, hit in hits.items():
        assert hit > 0.8 * most, policy

"""The own eviction policy beside recency, on the real cache."""

import random
from collections.abc import Sequence

from benchmarks.cache.eviction_policies import POLICIES
from transom_core.config import SchedulerConfig
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout
from transom_worker.kvcache.manager import KvCache
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.simulate.replay import Replay, StepCost, VirtualClock
from transom_worker.simulate.workload import Run, SimulatedRequest, TokenSpace, Workload

UNIT = 16
PROMPT_UNITS = 4


def hit_tokens(policy: str, prompts: Sequence[tuple[Run, ...]], *, num_pages: int) -> int:
    """Of prompts with answers of one token, one at a time, on a model with one full group, whose pages have one block each."""
    spec = GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=UNIT)
    group = GroupLayout(spec=spec, block_bytes=256, stride_bytes=256, layers=())
    layout = ArenaLayout(page_bytes=256, num_pages=num_pages, groups=(group,))
    space = TokenSpace()
    space.take(1_000_000)
    requests = tuple(SimulatedRequest(prompt=prompt, answer=space.take(1)) for prompt in prompts)
    workload = Workload(name="test", requests=requests)
    cache = KvCache(layout, block_size=UNIT, policy=POLICIES[policy]())
    scheduler = Scheduler(SchedulerConfig(), cache, max_model_len=4_096)
    replay = Replay(scheduler, workload.one_by_one(), cost=StepCost(), clock=VirtualClock())
    assert replay.run().requests == len(prompts)
    outcome = scheduler.stats().outcome_tokens
    assert sum(outcome.values()) == sum(run.num_tokens for prompt in prompts for run in prompt)
    return outcome.get("hit", 0)


def test_recency_loses_a_hot_prompt_to_a_scan_and_the_own_policy_keeps_it() -> None:
    space = TokenSpace()
    hot = (space.take(PROMPT_UNITS * UNIT),)
    prompts = [hot, hot]
    for _ in range(12):
        prompts += [*((space.take(PROMPT_UNITS * UNIT),) for _ in range(9)), hot]
    hits = {policy: hit_tokens(policy, prompts, num_pages=7 * PROMPT_UNITS) for policy in POLICIES}
    assert hits["default"] > 0.8 * 13 * (PROMPT_UNITS - 1) * UNIT
    assert hits["lru"] == (PROMPT_UNITS - 1) * UNIT


def test_documents_that_many_prompts_begin_with_are_kept_though_no_prompt_comes_again() -> None:
    """Every fourth prompt is one of 12 documents with a question of its own; the others never come again.

    Each document comes again after 48 requests on average, which have far more blocks than the pool. A prompt that leaves another
    far before a node's end is its share of a return, and what both share becomes a node, even if the first one was evicted before.
    """
    rng, space = random.Random(1), TokenSpace()
    documents = [space.take(160 * UNIT) for _ in range(12)]
    prompts: list[tuple[Run, ...]] = []
    for _ in range(100):
        prompts.append((rng.choice(documents), space.take(70 * UNIT)))
        prompts += [(space.take(80 * UNIT),) for _ in range(3)]
    most = (100 - 12) * 160 * UNIT
    assert hit_tokens("default", prompts, num_pages=2_500) >= 0.75 * most

"""A plan's figures: against published ones, and against counting; as many requests as planned run to their length together, and
one more waits or is preempted."""

from collections import deque
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.matrices import matrix
from tests.worker.models.test_dense_families import DELTA_NET
from tests.worker.planner.model_configs import CONFIGS
from transom_core.config import SchedulerConfig
from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, Request, SamplingParams, WindowPolicy
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout
from transom_core.kv_cache.retention import Retention
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.policy_retentions import retention_under
from transom_worker.planner.pages import peak_demands
from transom_worker.planner.plan import CachePlan, plan_cache, plan_from_config
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan, StepResult

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "more", "theirs"),
    [
        ("gpt-oss-20b", {}, 12.54),
        ("gemma-3-27b", {}, 2.81),
        ("gemma-4-31b-like", {"max_model_len": 131_072}, 2.35),
        ("llama-4-scout", {"tensor_parallel_size": 8}, 6.37),
        ("deepseek-v4-flash", {"kv_cache_dtype": "fp8_ds_mla"}, 5.75),
        ("deepseek-v4-flash", {}, 3.60),
    ],
)
def test_at_least_as_many_requests_as_in_vllm(name: str, more: dict[str, object], theirs: float) -> None:
    plan = plan_from_config(CONFIGS[name], memory_bytes=40 * GIB, **more)  # type: ignore[arg-type]
    assert plan.concurrency[-1].requests_with_budget >= int(theirs)


KINDS = st.sampled_from(
    [
        dict(kind=GroupKind.FULL),
        dict(kind=GroupKind.WINDOW, window=9),
        dict(kind=GroupKind.SINKS_WINDOW, window=20, sinks=5),
        dict(kind=GroupKind.CONVOLUTION, window=3),
        dict(kind=GroupKind.STATE, window=2),
        dict(kind=GroupKind.CHUNK, chunk=24),
        dict(kind=GroupKind.CHUNK, chunk=13),
        dict(kind=GroupKind.COMPRESSOR_STATE, ratio=16, overlap=1),
    ]
)


@settings(max_examples=60)
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    length=st.integers(2, 300),
    pages=st.integers(4, 400),
)
def test_requests_are_counted_page_by_page(
    kinds: list[dict[str, object]], sizes: list[int], length: int, pages: int
) -> None:
    """Brute force: at every token, this many requests' blocks of each group in whole pages."""
    groups = [
        GroupLayout(
            spec=GroupSpec(name=str(index), layers=(0,), block_size=4, **kind),  # type: ignore[arg-type]
            block_bytes=size * 256,
            stride_bytes=0,
            layers=(),
        )
        for index, (kind, size) in enumerate(zip(kinds, sizes, strict=False))
    ]
    plan = plan_cache(
        groups, memory_bytes=pages * 256 * max(sizes), block_size=4, max_model_len=length, max_num_batched_tokens=64
    )
    layout = plan.layout
    retentions = [Retention(group.spec) for group in layout.groups]
    held = {tuple(retention.allocated_blocks(n) for retention in retentions) for n in range(max(1, length - 1))}

    def fit(count: int) -> bool:
        room = [layout.blocks_per_page(index) for index in range(len(groups))]
        return all(
            sum(-(-count * blocks // per_page) for blocks, per_page in zip(demand, room, strict=True))
            <= layout.num_pages
            for demand in held
        )

    requests = plan.concurrency[-1].requests
    assert fit(requests)
    assert not fit(requests + 1)
    assert plan.concurrency[-1].requests_with_budget <= requests
    assert [group.peak_blocks for group in plan.groups] == [max(blocks) for blocks in zip(*held, strict=True)]
    assert set(peak_demands([Retention(group.spec) for group in layout.groups], length, block_size=4, lag=0)) <= held


PROMPT_TOKENS = 3
BASE = CONFIGS["llama-3-8b"] | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
MIXES: dict[str, dict[str, Any]] = {
    "full": BASE | {"num_hidden_layers": 3},
    "window": BASE | {"model_type": "mistral", "num_hidden_layers": 3, "sliding_window": 20},
    "full and window": BASE | {"model_type": "gpt_oss", "num_hidden_layers": 4, "sliding_window": 20},
    "uneven full and window": BASE | {"model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 33},
    "full and chunk": BASE | {"model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 32},
    "full and state": BASE | DELTA_NET | {"model_type": "qwen3_5_text", "num_hidden_layers": 4},
    "full and ragged chunk": BASE | {"model_type": "llama4_text", "num_hidden_layers": 8, "attention_chunk_size": 27},
}
MIXES["compressed"] = CONFIGS["deepseek-v4-flash"] | {
    **{"num_hidden_layers": 4, "layer_types": CONFIGS["deepseek-v4-flash"]["layer_types"][:4]},
    **{"max_position_embeddings": 512, "compress_rates": {"heavily_compressed_attention": 32}, "sliding_window": 20},
    **{"head_dim": 32, "qk_rope_head_dim": 8, "index_head_dim": 8},
}


def planned(mix: str, pool_kib: int, length: int, **more: Any) -> CachePlan:
    return plan_from_config(MIXES[mix], memory_bytes=pool_kib * 1024, block_size=8, max_model_len=length, **more)


def run_together(
    layout: ArenaLayout,
    *,
    num_requests: int,
    length: int,
    block_size: int,
    steps_in_flight: int = 1,
    kv_policy: KvPolicy | None = None,
    max_model_len: int | None = None,
) -> bool:
    """Whether `num_requests` requests of `length` tokens, prompt and answer, are in every step to their end, with the cache off.

    A request that waits, even for a step, or is preempted ends the run. Every block gets much attention.
    """
    config = SchedulerConfig(
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * block_size,  # a new block for each of them in a step
        steps_in_flight=steps_in_flight,
    )
    cache = KvCache(layout, block_size=block_size, enable_prefix_caching=False)
    scheduler = Scheduler(config, cache, max_model_len=max_model_len or length)
    for index in range(num_requests):
        params = SamplingParams(max_tokens=length - PROMPT_TOKENS)
        scheduler.add(
            Request(request_id=str(index), prompt_token_ids=(1, 2, 3), params=params, seed=0, kv_policy=kv_policy)
        )
    plans: deque[StepPlan] = deque()
    while scheduler.has_work:
        while (plan := scheduler.schedule()) is not None:
            if len(plan.seq_ids) < num_requests:
                return False
            plans.append(plan)
        plan = plans.popleft()
        result = StepResult(step_id=plan.step_id, sampled_ids=[7] * sum(plan.sample))
        result.attention_mass = {row: [1.0] * length for row, wants in enumerate(plan.wants_mass) if wants}
        for output in scheduler.receive(result):
            if output.at_limit:
                scheduler.abort(output.request_id)
    return not scheduler.work.preemptions["recompute"]


@pytest.mark.parametrize(
    ("mix", "length", "steps_in_flight"), matrix(list(MIXES), [64, 100, 129, 256], [1, 2], strength=1)
)
def test_planned_requests_fit_and_one_more_does_not(mix: str, length: int, steps_in_flight: int) -> None:
    for pool_kib in (300, 407, 1000):
        plan = planned(mix, pool_kib, length, steps_in_flight=steps_in_flight)
        requests = plan.concurrency[-1].requests
        together: dict[str, Any] = {"length": length, "block_size": 8, "steps_in_flight": steps_in_flight}
        if requests:
            assert run_together(plan.layout, num_requests=requests, **together)
            assert not run_together(plan.layout, num_requests=requests + 1, **together)


POLICIES = (
    WindowPolicy(sinks=0, window=20),
    WindowPolicy(sinks=9, window=40),
    AdaptivePolicy(sinks=4, min_window=8, max_window=48, threshold=0.1),
    HeavyPolicy(sinks=4, budget=60),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.text)
@pytest.mark.parametrize("length", [24, 41, 129])
def test_planned_requests_with_a_kv_policy_fit_and_one_more_does_not(policy: KvPolicy, length: int) -> None:
    for pool_kib in (300, 1000):
        plan = planned("full", pool_kib, length, retention_of=partial(retention_under, policy))
        requests, of_full = plan.concurrency[-1].requests, planned("full", pool_kib, length).concurrency[-1].requests
        assert (requests > of_full) == (length == 129 or (length == 41 and policy.text == POLICIES[0].text))
        # The scheduler's length is longer: a policy of this size is allowed, and requests end at theirs.
        together: dict[str, Any] = {"length": length, "block_size": 8, "kv_policy": policy, "max_model_len": 256}
        assert run_together(plan.layout, num_requests=requests, **together)
        assert not run_together(plan.layout, num_requests=requests + 1, **together)

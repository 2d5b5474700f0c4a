"""As many requests as planned run to their length together; one more waits or is preempted."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import pytest

from tests.matrices import matrix
from tests.worker.planner.model_configs import CONFIGS
from transom_core.config import SchedulerConfig
from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, Request, SamplingParams, WindowPolicy
from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.kvcache.policy_retentions import retention_under
from transom_worker.planner import plan_from_config
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan, StepResult

PROMPT_TOKENS = 3
BASE = CONFIGS["llama-3-8b"] | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
MIXES: dict[str, dict[str, Any]] = {
    "full": BASE | {"num_hidden_layers": 3},
    "window": BASE | {"model_type": "mistral", "num_hidden_layers": 3, "sliding_window": 20},
    "full and window": BASE | {"model_type": "gpt_oss", "num_hidden_layers": 4, "sliding_window": 20},
    "uneven full and window": BASE | {"model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 33},
    "full and chunk": BASE | {"model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 32},
    "full and ragged chunk": BASE | {"model_type": "llama4_text", "num_hidden_layers": 8, "attention_chunk_size": 27},
}
COMPRESSED = {
    "num_hidden_layers": 4,
    "layer_types": CONFIGS["deepseek-v4-flash"]["layer_types"][:4],
    "max_position_embeddings": 512,
    "compress_rates": {"heavily_compressed_attention": 32},
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "index_head_dim": 8,
    "sliding_window": 20,
}
MIXES["compressed"] = CONFIGS["deepseek-v4-flash"] | COMPRESSED


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
    scheduler = Scheduler(
        config, layout, block_size=block_size, max_model_len=max_model_len or length, enable_prefix_caching=False
    )
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
        plan = plan_from_config(
            MIXES[mix],
            memory_bytes=pool_kib * 1024,
            block_size=8,
            max_model_len=length,
            steps_in_flight=steps_in_flight,
        )
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
        plan = plan_from_config(
            MIXES["full"],
            memory_bytes=pool_kib * 1024,
            block_size=8,
            max_model_len=length,
            retention_of=partial(retention_under, policy),
        )
        requests = plan.concurrency[-1].requests
        full = plan_from_config(MIXES["full"], memory_bytes=pool_kib * 1024, block_size=8, max_model_len=length)
        assert (requests > full.concurrency[-1].requests) == (
            length == 129 or (length == 41 and policy.text == POLICIES[0].text)
        )
        # The scheduler's length is longer: a policy of this size is allowed, and requests end at theirs.
        together: dict[str, Any] = {"length": length, "block_size": 8, "kv_policy": policy, "max_model_len": 256}
        assert run_together(plan.layout, num_requests=requests, **together)
        assert not run_together(plan.layout, num_requests=requests + 1, **together)

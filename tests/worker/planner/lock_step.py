"""Requests of one length, all brought to it together by the real scheduler, on made-up answers."""

from __future__ import annotations

from collections import deque

from transom_core.config import SchedulerConfig
from transom_core.contract import KvPolicy, Request, SamplingParams
from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan, StepResult

PROMPT_TOKENS = 3


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

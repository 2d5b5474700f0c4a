"""`RateMeter`: measures what computing a token and loading a block cost, from the steps' results (`kvcache.load_rates`).

The measured rates are averages that weigh a measurement by how noisy they have been (`noisy_mean`). The cache gets new ones only
when one of them is off by more than a quarter, since each change is sent to every router, whose prediction must be the worker's own
hit.

Loads are measured only where they are made, and they are made where they look cheap. Two rules keep an estimate that is too high
from ending all loads for ever:

- The estimate is *optimistic*: less than the mean by as much as noise may have raised it. So a few slow loads among many do not
  stop them.
- While prompts are computed and none is loaded, the estimate decays, until a load is tried again. That one counts for more then.

Example with the constants below: loads took exactly 3 times as long as computing; after 80 steps with prompts one is tried, which
costs 2 more times, and the estimate is 3 again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from transom_core.kv_cache.load_rates import LoadRates
from transom_worker.scheduling.noisy_mean import NoisyMean
from transom_worker.scheduling.step import StepPlan, StepTimings

LEAST_TOKENS = 32  # of prompts in a step; fewer are no measure of what a prompt token costs
STEP = 1.25  # rates change when they are off by this factor
OPTIMISM = 1.0  # standard deviations by which the estimate of a load is below the mean
STALE_STEPS = 16  # steps with prompts and without a load, after which the estimate of a load decays
DECAY = 0.8
MOST_DECAYS = 12  # to 7 % of what was measured


class RateMeter:
    """Learns from steps and loads; `block_bytes` are a block's bytes by group."""

    def __init__(self, block_bytes: Sequence[int]) -> None:
        self._block_bytes = block_bytes
        self._token_s = NoisyMean()
        self._byte_s = NoisyMean()
        self._num_steps = 0  # with prompts, since the last load or decay
        self._num_decays = 0  # since the last load

    def stepped(self, plan: StepPlan, timings: StepTimings) -> None:
        """Learn from a step that computed mostly prompt tokens."""
        elapsed_s = timings.prepare_s + timings.forward_s + timings.sample_s
        num_prompt_tokens = sum(count for count in plan.count if count > 1)
        if elapsed_s > 0 and num_prompt_tokens >= max(LEAST_TOKENS, plan.num_tokens // 2):
            self._token_s.add(elapsed_s / plan.num_tokens)
            self._num_steps += 1
            if self._num_steps == STALE_STEPS:
                self._num_steps = 0
                self._num_decays = min(self._num_decays + 1, MOST_DECAYS)

    def loaded(self, num_blocks: Sequence[int], elapsed_s: float) -> None:
        """Learn from a load of `num_blocks` blocks, by group."""
        num_bytes = sum(count * size for count, size in zip(num_blocks, self._block_bytes, strict=True))
        if elapsed_s > 0 and num_bytes:
            self._byte_s.add(elapsed_s / num_bytes, drift=self._num_decays * math.log(DECAY))
            self._num_steps = self._num_decays = 0

    def next_rates(self, present: LoadRates) -> LoadRates | None:
        """Return the rates that should hold instead of the present ones; None if those are near enough."""
        token_ns, block_ns = present.token_ns, present.block_ns
        if self._token_s.num_measured:
            token_ns = _stepwise(token_ns, self._token_s.mean() * 1e9)
        if self._byte_s.num_measured:
            byte_ns = self._byte_s.mean(optimism=OPTIMISM) * DECAY**self._num_decays * 1e9
            pairs = zip(block_ns, self._block_bytes, strict=True)
            block_ns = tuple(_stepwise(ns, byte_ns * size) for ns, size in pairs)
        rates = present._replace(token_ns=token_ns, block_ns=block_ns)
        return None if rates == present else rates


def _stepwise(present_ns: int, measured_ns: float) -> int:
    is_near = present_ns / STEP <= measured_ns <= present_ns * STEP
    return present_ns if is_near else max(1, round(measured_ns))

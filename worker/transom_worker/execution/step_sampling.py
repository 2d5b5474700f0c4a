"""Turns a step's logits into its result: samples tokens, and computes the log-probabilities of prompt tokens.

Legend: S rows that are sampled, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_core.contract import LogprobTable
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.device_queue import DeviceQueue, Fetch
from transom_worker.execution.step_logits import StepLogits, logit_row_ends
from transom_worker.sampling.sharded import ShardedSampler
from transom_worker.scheduling.step import StepPlan, StepResult


@dataclass(slots=True)
class SampledIds:
    """The tokens that a step samples. `rows` maps each batch row that samples to its place s among them.

    `ids_S` are the tokens on the device, int64 [S]; None if the host got them at once. `known` are the tokens on the host; None
    until `wait` has been called.
    """

    rows: dict[int, int]
    ids_S: torch.Tensor | None
    known: list[int] | None
    fetch: Fetch | None = None

    def wait(self) -> list[int]:
        """Return the tokens, in order of s. This is the only place where the host waits for the device to compute them."""
        if self.known is None:
            assert self.fetch is not None
            self.known = self.fetch()
        return self.known


@torch.inference_mode()
def sample_step(
    plan: StepPlan,
    logits: StepLogits,
    result: StepResult,
    *,
    sampler: ShardedSampler,
    store: SequenceStore,
    queue: DeviceQueue,
) -> SampledIds:
    """Begin to sample, write log-probabilities into `result`, and return the sampled tokens.

    The tokens stay on the device until they are waited for, unless log-probabilities or other ranks need them on the host.
    """
    rows = [b for b, sample in enumerate(plan.sample) if sample]
    all_rows = len(rows) == len(plan.seq_ids)
    seq_ids = plan.seq_ids if all_rows else [plan.seq_ids[b] for b in rows]
    places = {b: s for s, b in enumerate(rows)}
    ids_S = sampler.launch(logits.sampled_SV, seq_ids, plan.grammar_mask) if rows and not logits.has_others else None
    if ids_S is not None:
        return SampledIds(places, ids_S, None, queue.fetch(ids_S))
    sampled = sampler.sample(logits.sampled_SV, seq_ids, plan.grammar_mask)
    result.logprobs = sampled.logprobs
    if logits.has_others:
        ends = logit_row_ends(plan)
        for b in range(len(plan.seq_ids)):
            logprobs = _prompt_logprobs(plan, b, logits, ends[b], sampler, store)
            if logprobs is not None:
                result.prompt_logprobs[b] = logprobs
    return SampledIds(places, None, sampled.token_ids)


def _prompt_logprobs(
    plan: StepPlan, b: int, logits: StepLogits, row_end: int, sampler: ShardedSampler, store: SequenceStore
) -> LogprobTable | None:
    """Return the log-probabilities of prompt tokens that batch row `b` computes; None if it computes none."""
    sequence = store[plan.seq_ids[b]]
    if sequence.prompt_logprobs is None:
        return None
    first, end = plan.logits_from[b], plan.start[b] + plan.count[b]
    last = min(end, sequence.num_prompt_tokens - 1)  # the last prompt position predicts the first output token
    if last <= first:
        return None
    row = row_end - (end - first)
    table = LogprobTable(1 + sequence.prompt_logprobs)
    for begin, logits_LV in logits.slices(row, row + last - first):
        position = first + begin - row
        chosen = sequence.tokens(position + 1, position + 1 + len(logits_LV)).tolist()
        table.extend(sampler.logprob_table(logits_LV, chosen, sequence.prompt_logprobs))
    return table

"""Turns a step's logits into its result: samples, and computes log-probabilities of prompts.

Legend: S rows that are sampled, V vocabulary.
"""

from __future__ import annotations

import torch

from transom_core.contract import LogprobTable
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.step_logits import StepLogits, logit_row_ends
from transom_worker.sampling.sharded import ShardedSampler
from transom_worker.scheduling.step import StepPlan, StepResult


@torch.inference_mode()
def sample_step(
    plan: StepPlan, logits: StepLogits, result: StepResult, *, sampler: ShardedSampler, store: SequenceStore
) -> dict[int, int]:
    """Sample, write tokens and log-probabilities into `result`, and return the sampled token of each batch row that was
    sampled.
    """
    rows = [b for b, sample in enumerate(plan.sample) if sample]
    all_rows = len(rows) == len(plan.seq_ids)
    seq_ids = plan.seq_ids if all_rows else [plan.seq_ids[b] for b in rows]
    sampled = sampler.sample(logits.sampled_SV, seq_ids, plan.grammar_mask)
    result.sampled_ids, result.logprobs = sampled.token_ids, sampled.logprobs
    if logits.has_others:
        ends = logit_row_ends(plan)
        for b in range(len(plan.seq_ids)):
            logprobs = _prompt_logprobs(plan, b, logits, ends[b], sampler, store)
            if logprobs is not None:
                result.prompt_logprobs[b] = logprobs
    return dict(zip(rows, sampled.token_ids, strict=True))


def _prompt_logprobs(
    plan: StepPlan, b: int, logits: StepLogits, row_end: int, sampler: ShardedSampler, store: SequenceStore
) -> LogprobTable | None:
    """The log-probabilities of prompt tokens that batch row `b` computes; None if it computes none."""
    sequence = store[plan.seq_ids[b]]
    if sequence.prompt_logprobs is None:
        return None
    first, end = plan.logits_from[b], plan.start[b] + plan.count[b]
    last = min(end, sequence.num_prompt_tokens - 1)  # the last prompt position predicts the output
    if last <= first:
        return None
    row = row_end - (end - first)
    table = LogprobTable(1 + sequence.prompt_logprobs)
    for begin, logits_LV in logits.slices(row, row + last - first):
        position = first + begin - row
        chosen = sequence.tokens(position + 1, position + 1 + len(logits_LV)).tolist()
        table.extend(sampler.logprob_table(logits_LV, chosen, sequence.prompt_logprobs))
    return table

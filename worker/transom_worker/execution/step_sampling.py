"""Turns a step's logits into its result: picks the rows that are sampled, and computes log-probabilities of prompts.

Legend: R rows with logits, S rows that are sampled, V vocabulary.
"""

from __future__ import annotations

import torch

from transom_worker.contract import TokenLogprobs
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.sampling.sharded import ShardedSampler
from transom_worker.scheduling.step import StepPlan, StepResult


def sample_step(
    plan: StepPlan, logits_RV: torch.Tensor, result: StepResult, *, sampler: ShardedSampler, store: SequenceStore
) -> dict[int, int]:
    """Sample, write tokens and log-probabilities into `result`, and return the sampled token of each batch row that was
    sampled.
    """
    if len(logits_RV) == len(plan.seq_ids) == plan.sample.count(1):  # a decode step: all rows are sampled
        sampled = sampler.sample(logits_RV, plan.seq_ids, plan.grammar_mask)
        result.sampled_ids, result.logprobs = sampled.token_ids, sampled.logprobs
        return dict(enumerate(sampled.token_ids))
    ends = _logit_row_ends(plan)
    rows = [b for b, sample in enumerate(plan.sample) if sample]
    rows_S = torch.tensor([ends[b] - 1 for b in rows], dtype=torch.int64).to(logits_RV.device, non_blocking=True)
    sampled = sampler.sample(logits_RV[rows_S], [plan.seq_ids[b] for b in rows], plan.grammar_mask)
    result.sampled_ids, result.logprobs = sampled.token_ids, sampled.logprobs
    for b in range(len(plan.seq_ids)):
        logprobs = _prompt_logprobs(plan, b, logits_RV, ends[b], sampler, store)
        if logprobs:
            result.prompt_logprobs[b] = logprobs
    return dict(zip(rows, sampled.token_ids, strict=True))


def _prompt_logprobs(
    plan: StepPlan, b: int, logits_RV: torch.Tensor, row_end: int, sampler: ShardedSampler, store: SequenceStore
) -> list[TokenLogprobs]:
    sequence = store[plan.seq_ids[b]]
    if sequence.prompt_logprobs is None:
        return []
    first, end = plan.logits_from[b], plan.start[b] + plan.count[b]
    last = min(end, sequence.num_prompt_tokens - 1)  # the last prompt position predicts the output
    if last <= first:
        return []
    row = row_end - (end - first)
    chosen = sequence.tokens(first + 1, last + 1).tolist()
    return sampler.token_logprobs(logits_RV[row : row + last - first], chosen, [sequence.prompt_logprobs] * len(chosen))


def _logit_row_ends(plan: StepPlan) -> list[int]:
    """The end of each sequence's rows among the R rows of logits, [B]: sequence b has rows [ends[b - 1], ends[b])."""
    ends, total = [], 0
    for start, count, first in zip(plan.start, plan.count, plan.logits_from, strict=True):
        total += max(0, start + count - first)
        ends.append(total)
    return ends

"""Steps over no sequence's blocks: to warm a model up, and to see its peak memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_worker.contract import SamplingParams
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.kvcache.groups import GroupSpec
from transom_worker.models.model import Model
from transom_worker.scheduling.step import NewSequence, StepPlan

WARM_UP_TOKENS = 16
MORE_TOKENS = (
    64,
    256,
    1024,
    4096,
)  # the tiles of experts, and torch's choice of matrix products, go by the number of rows
PAST_TOKENS = 2100  # so many that one token's keys are shared out over programs


def warm_up(
    model: Model,
    builder: BatchBuilder,
    groups: Sequence[GroupSpec],
    *,
    most_tokens: int,
    max_model_len: int,
    compiles: bool,
) -> torch.Tensor:
    """Lets operators pick and cache what they need for a prompt and for decoding; returns logits [1, V].

    Where kernels are compiled when first launched, every kind of step is tried, so that no request waits for a compiler.
    """
    steps = [(0, min(WARM_UP_TOKENS, most_tokens, max_model_len))]
    if compiles:
        steps += [(0, count) for count in MORE_TOKENS if count <= min(most_tokens, max_model_len)]
        past = min(PAST_TOKENS, max_model_len - 3)
        steps += [(past, count) for count in (3, 1) if past > 0 and count <= most_tokens]
    for start, count in steps:
        dummy_run(model, builder, groups, [count], start=start)
    return dummy_run(model, builder, groups, [1])


def dummy_run(
    model: Model, builder: BatchBuilder, groups: Sequence[GroupSpec], counts: Sequence[int], *, start: int = 0
) -> torch.Tensor:
    """One forward pass over sequences of `counts` new tokens, the first one's behind `start`: reads block 0 throughout, writes to
    the dump blocks alone. Returns their logits, [B, V]."""
    store = SequenceStore(groups, max_num_seqs=len(counts))
    starts = [start] + [0] * (len(counts) - 1)
    ends = [first + count for first, count in zip(starts, counts, strict=True)]
    for seq_id, end in enumerate(ends):
        store.add(_blank_sequence(seq_id, end))
        for tables in store.tables:
            blocks = [0] * -(-end // tables.block_size)
            tables.apply(store[seq_id].row, dropped=0, first_block=0, blocks=blocks)
    plan = StepPlan(
        step_id=-1,
        seq_ids=list(range(len(counts))),
        start=starts,
        count=list(counts),
        attend_from=[[0] * len(counts) for _ in groups],
        write_from=[list(ends) for _ in groups],
        logits_from=[end - 1 for end in ends],
    )
    with torch.inference_mode():
        logits_BV = model.forward(builder.build(plan, store))
        logits_BV.max(-1).indices.tolist()
    return logits_BV


def worst_case_counts(*, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> list[int]:
    """Tokens of each sequence in a step that needs the most memory: long prompts, and as many rows of logits as may be."""
    counts = [1] * min(max_num_seqs, max_num_batched_tokens)
    left = max_num_batched_tokens - len(counts)
    for index in range(len(counts)):
        more = min(left, max_model_len - 1)
        counts[index] += more
        left -= more
    return counts


def worst_case_start(groups: Sequence[GroupSpec], count: int, max_model_len: int) -> int:
    """Tokens before the longest of those prompts, of `count` new tokens, in that step.

    An indexer's scores, and lists of the entries that queries read, grow with the whole sequence.
    """
    return max(0, max_model_len - count) if any(group.ratio for group in groups) else 0


def _blank_sequence(seq_id: int, count: int) -> NewSequence:
    return NewSequence(
        seq_id=seq_id,
        request_id="",
        token_ids=(0,) * count,
        num_prompt_tokens=count,
        params=SamplingParams(temperature=0.0),
        seed=0,
    )

"""Steps over no sequence's blocks: to warm a model up, and to see its peak memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_worker.contract import SamplingParams
from transom_worker.execution.batch import BatchBuilder
from transom_worker.execution.sequences import SequenceStore
from transom_worker.kvcache.groups import GroupSpec
from transom_worker.models.model import Model
from transom_worker.scheduling.step import NewSequence, StepPlan


def dry_run(model: Model, builder: BatchBuilder, groups: Sequence[GroupSpec], counts: Sequence[int]) -> None:
    """One forward pass over sequences of `counts` tokens: reads block 0 throughout, writes to the dump blocks alone."""
    store = SequenceStore(groups, max_num_seqs=len(counts))
    for seq_id, count in enumerate(counts):
        store.add(_blank_sequence(seq_id, count))
        for tables in store.tables:
            blocks = [0] * -(-count // tables.block_size)
            tables.apply(store[seq_id].row, dropped=0, first_block=0, blocks=blocks)
    plan = StepPlan(
        step_id=-1,
        seq_ids=list(range(len(counts))),
        start=[0] * len(counts),
        count=list(counts),
        attend_from=[[0] * len(counts) for _ in groups],
        write_from=[list(counts) for _ in groups],
        logits_from=[count - 1 for count in counts],
    )
    with torch.inference_mode():
        model.forward(builder.build(plan, store)).max(-1).indices.tolist()


def worst_counts(*, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> list[int]:
    """Tokens of each sequence in a step that needs the most memory: long prompts, and as many rows of logits as may be."""
    counts = [1] * min(max_num_seqs, max_num_batched_tokens)
    left = max_num_batched_tokens - len(counts)
    for index in range(len(counts)):
        more = min(left, max_model_len - 1)
        counts[index] += more
        left -= more
    return counts


def _blank_sequence(seq_id: int, count: int) -> NewSequence:
    return NewSequence(
        seq_id=seq_id,
        request_id="",
        token_ids=(0,) * count,
        num_prompt_tokens=count,
        params=SamplingParams(temperature=0.0),
        seed=0,
    )

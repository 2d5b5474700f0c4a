"""What `policy_attention` and `add_block_mass` get: tensors, compact block tables, and each sequence's own window and sinks.

A KV policy may drop any blocks of a sequence. A *compact* block table has a column for each block that is left, in ascending order
of positions, and `key_blocks` says which logical block each column is. With blocks of 4 tokens:

    column               0   1   2   3
    block_table         17   3  20   8      block ids
    key_blocks           0   5   9  10      logical blocks: the keys at positions 0-3, 20-23, 36-39 and 40-43

A *table index* is a key's place in the table (column * P + offset). Since columns ascend, the keys that a row sees are one or two
ranges of table indices: the sink tokens, and the run.

Legend: B sequences, T query tokens, N table columns, P block size in tokens, H query heads, D key width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.paged_attention.inputs import AttentionBatch, AttentionInputs


@dataclass(slots=True, kw_only=True)
class PolicyBatch(AttentionBatch):
    """Everything that `policy_attention` reads, besides queries and caches.

    The query at position p sees key k of the table if k <= p and (k < sinks or window == 0 or k > p - window). The blocks of a
    sequence's new tokens are always in its table. Columns of `block_table` from `num_columns` on may hold anything.
    """

    key_blocks: torch.Tensor  # [B, N] int32 logical block of each column, ascending
    num_columns: torch.Tensor  # [B] int32
    window: torch.Tensor  # [B] int32 tokens, the query counted; 0: all that the table holds
    sinks: torch.Tensor  # [B] int32: keys below this position are seen with any window


@dataclass(slots=True, kw_only=True)
class PolicyInputs(AttentionInputs):
    """Queries and caches (`AttentionInputs`), compact block tables, and two tensors that only some policies need."""

    batch: PolicyBatch
    sink_q: torch.Tensor | None = None  # [T, H, D]: multiplied with the keys of sink tokens instead of q
    statistics: torch.Tensor | None = None  # [T, H, 2] float32: maximum (base 2) and sum of each row's softmax

    def check(self) -> None:
        """Raise ValueError unless shapes, dtypes and options fit together."""
        super(PolicyInputs, self).check()
        for name, value, shape in (
            ("sink_q", self.sink_q, self.q.shape),
            ("statistics", self.statistics, (*self.q.shape[:2], 2)),
        ):
            if value is not None and tuple(value.shape) != tuple(shape):
                raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {tuple(shape)}.")

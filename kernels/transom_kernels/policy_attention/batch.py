"""The attention metadata of rows with a KV policy: compact block tables, and a mask rule of its own for each sequence.

A KV policy keeps some blocks of a sequence and drops others, anywhere. A *compact* block table has a column for each block that is
left, in ascending order, and says which logical block each column is. With blocks of 4 tokens:

    column               0   1   2   3
    block_table         17   3  20   8      block ids
    key_blocks           0   5   9  10      logical blocks: the keys at positions 0-3, 20-23, 36-39 and 40-43

A *table index* is a key's place in the table (column * P + offset). Since columns ascend, the keys that a row sees are one or two
ranges of table indices: the sink tokens, and the run.

Legend: B sequences, T query tokens, N table columns, P block size in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch:
    """What `policy_attention` reads besides queries and caches.

    The query at position p sees key k of the table when k <= p, and k < sinks or window == 0 or k > p - window. Every table has
    the blocks of its own sequence's new tokens.
    """

    block_size: int
    block_table: torch.Tensor  # [B, N] int32 block ids; columns from num_columns on may hold anything
    key_blocks: torch.Tensor  # [B, N] int32 logical block of each column, ascending
    num_columns: torch.Tensor  # [B] int32
    window: torch.Tensor  # [B] int32 tokens, the query counted; 0: all that the table holds
    sinks: torch.Tensor  # [B] int32: keys below this position are seen whatever the window
    start: torch.Tensor  # [B] int32 position of the first query
    query_offset: torch.Tensor  # [B + 1] int32: rows of sequence b are [query_offset[b], query_offset[b + 1])
    row_sequence: torch.Tensor  # [T] int32: the sequence of each row
    count_host: list[int]  # rows of each sequence, [B]; empty in steps that CPUs record
    scratch: dict[Any, Any] = field(default_factory=dict)  # what one layer computes and later layers of the step reuse

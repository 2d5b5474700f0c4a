"""What attention over one KV cache group needs to know about a batch.

Legend: B sequences, T query tokens, N table columns, P block size in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class HostBatch(Protocol):
    """What the host has to know of a `PagedBatch` to cut it into programs; see there."""

    @property
    def block_size(self) -> int:
        """Tokens."""
        ...

    @property
    def num_sink_blocks(self) -> int:
        """Columns."""
        ...

    @property
    def first_block_host(self) -> list[int]:
        """[B]."""
        ...

    @property
    def attend_from_host(self) -> list[int]:
        """[B]."""
        ...

    @property
    def start_host(self) -> list[int]:
        """[B]."""
        ...

    @property
    def count_host(self) -> list[int]:
        """[B]."""
        ...


@dataclass(slots=True, kw_only=True)
class PagedBatch:
    """One group's side of a batch.

    Column `c` of `block_table` is logical block `c` while `c < num_sink_blocks`, else
    `first_block[b] + c - num_sink_blocks`; only columns with a key in `[0, start + count)` are valid, the rest is -1.
    Host copies (`*_host`) are the same numbers as Python ints, for paths that slice; of tables none where Triton's kernels run.
    """

    block_size: int
    num_sink_blocks: int
    block_table: torch.Tensor  # [B, N] int32, -1 padded
    first_block: torch.Tensor  # [B] int32
    attend_from: torch.Tensor  # [B] int32: no key below it is read
    slots: torch.Tensor  # [T] int64: block * P + offset to write each token's K/V; the dump block where masked
    query_offset: torch.Tensor  # [B + 1] int32: rows of sequence b are [query_offset[b], query_offset[b + 1])
    start: torch.Tensor  # [B] int32: position of the first query
    block_table_host: list[list[int]]
    first_block_host: list[int]
    attend_from_host: list[int]
    start_host: list[int]
    count_host: list[int]
    scratch: dict[str, Any] = field(default_factory=dict)  # what a path computes once a step and uses in every layer

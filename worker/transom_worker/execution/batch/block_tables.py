"""One group's block tables on a rank: a matrix with a row per sequence, kept up by deltas.

Legend: B batch rows, N columns, P tokens per block.

Row layout: [0, num_sink_blocks) are the sink blocks, [num_sink_blocks, length) a run of consecutive logical blocks from
`first_block`.
A row shorter than num_sink_blocks has no run yet. Everything from `length` on is -1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from transom_worker.kvcache.groups import GroupSpec

Ints = NDArray[np.int64]


class BlockTables:
    """All sequences' tables of one group, by row number."""

    def __init__(self, spec: GroupSpec, *, num_rows: int, num_columns: int = 64) -> None:
        self.block_size = spec.block_size
        self.num_sink_blocks = spec.num_sink_blocks
        self._blocks = np.full((num_rows, max(num_columns, self.num_sink_blocks + 1)), -1, dtype=np.int32)
        self._length = np.zeros(num_rows, dtype=np.int64)
        self._first = np.full(num_rows, self.num_sink_blocks, dtype=np.int64)

    def apply(self, row: int, *, dropped: int, first_block: int, blocks: list[int]) -> None:
        """Drop blocks from the front of the run, then append at the table's end; the run then starts at `first_block`.

        Raises:
            ValueError: the run is shorter than `dropped`, or a pinned column would be left out.
        """
        length, pinned = int(self._length[row]), self.num_sink_blocks
        if dropped > max(0, length - pinned):
            raise ValueError(f"A delta drops {dropped} blocks of a run of {max(0, length - pinned)}.")
        if dropped:
            table = self._blocks[row]
            table[pinned : length - dropped] = table[pinned + dropped : length]
            table[length - dropped : length] = -1
            length -= dropped
        end = length + len(blocks)
        if end > self._blocks.shape[1]:
            self._widen(end)
        self._blocks[row, length:end] = blocks
        self._length[row] = end
        self._first[row] = max(first_block, pinned)

    def move(self, row: int, *, logical: int, block: int) -> None:
        """Logical block `logical` is `block` from now on.

        Raises:
            ValueError: the row has no such block.
        """
        first = int(self._first[row])
        column = logical if logical < self.num_sink_blocks else logical - first + self.num_sink_blocks
        in_gap = self.num_sink_blocks <= logical < first
        if in_gap or not 0 <= column < self._length[row]:
            raise ValueError(f"A plan moves logical block {logical}, which the sequence's table does not have.")
        self._blocks[row, column] = block

    def clear(self, row: int) -> None:
        """Forget a row's table."""
        self._blocks[row, : self._length[row]] = -1
        self._length[row] = 0
        self._first[row] = self.num_sink_blocks

    def add_rows(self, num_rows: int) -> None:
        """Room for more sequences."""
        more = np.full((num_rows, self._blocks.shape[1]), -1, dtype=np.int32)
        self._blocks = np.concatenate([self._blocks, more])
        self._length = np.concatenate([self._length, np.zeros(num_rows, dtype=np.int64)])
        self._first = np.concatenate([self._first, np.full(num_rows, self.num_sink_blocks, dtype=np.int64)])

    def gather(self, rows: Ints, end: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Tables [B, N] and first blocks [B] of `rows`, with only the columns that hold a position below `end` [B]."""
        length, first = self._length[rows], self._first[rows]
        num_logical = -(-end // self.block_size)
        holding = np.minimum(num_logical, self.num_sink_blocks) + np.maximum(0, num_logical - first)
        valid = np.minimum(length, holding)
        table = self._blocks[rows, : max(1, int(valid.max(initial=0)))]
        if (valid < length).any():
            table[np.arange(table.shape[1]) >= valid[:, None]] = -1
        return table, first

    def columns(self, logical: Ints, first: Ints) -> Ints:
        """The column of each logical block, given its row's first block; negative or too large where it has none."""
        run = logical - first + self.num_sink_blocks
        if self.num_sink_blocks == 0:
            return run
        return np.where(logical < self.num_sink_blocks, logical, np.where(logical < first, -1, run))

    def _widen(self, num_columns: int) -> None:
        more = max(num_columns, 2 * self._blocks.shape[1]) - self._blocks.shape[1]
        padding = np.full((self._blocks.shape[0], more), -1, dtype=np.int32)
        self._blocks = np.concatenate([self._blocks, padding], axis=1)

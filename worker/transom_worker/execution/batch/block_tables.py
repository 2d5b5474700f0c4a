"""Keeps the block tables of one group on a rank: `BlockTables`, a matrix with a row per sequence, and a `CompactTable` for each
sequence with a KV policy, which may remove blocks anywhere in the table. Each plan updates them by deltas.

A logical block is a range of `block_size` positions of a sequence: block 0 holds positions [0, block_size). The table maps
logical blocks to block ids. A group with a window loses blocks as the window moves on, but keeps the sink blocks, which hold
the first tokens:

    column   0 .. num_sink_blocks - 1   num_sink_blocks .. length - 1            length ..
    holds    logical blocks 0, 1, ...   logical blocks first_block, +1, +2, ...  NO_BLOCK
             (sink blocks, never        (the run: consecutive, dropped from
             dropped)                   the front)

Example: 1 sink block, first_block 5 and length 4 means columns [logical 0, logical 5, logical 6, logical 7]; logical blocks 1
to 4 were dropped. A row with at most `num_sink_blocks` columns has no run yet.

A *compact* table has one column for each block that is left, with the block's logical number, in ascending order. The first columns
are the policy's sink blocks, the columns after them the run. Example with one sink column, after blocks 1 to 4 left at the front of
the run and block 6 was removed:

    logical block     0   5   7   8
    block id         17   3  20   9

Measured rows (`policy_report`) also read the blocks that a policy has dropped: the tables of their sequences remember these in
`gone`.

Legend: B batch rows, N columns.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from transom_core.kv_cache.groups import GroupSpec

Ints = NDArray[np.int64]
NO_BLOCK = -1  # fills columns without a block


class BlockTables:
    """The block tables of all sequences of one group, by row number."""

    def __init__(self, spec: GroupSpec, *, num_rows: int, num_columns: int = 64) -> None:
        self.block_size = spec.block_size
        self.num_sink_blocks = spec.num_sink_blocks
        self._blocks = np.full((num_rows, max(num_columns, self.num_sink_blocks + 1)), NO_BLOCK, dtype=np.int32)
        self._length = np.zeros(num_rows, dtype=np.int64)
        self._first = np.full(num_rows, self.num_sink_blocks, dtype=np.int64)

    def apply(self, row: int, *, dropped: int, first_block: int, blocks: list[int]) -> None:
        """Drop `dropped` blocks from the front of a row's run, then append `blocks` to the row; the run then begins at
        `first_block`.

        Raises:
            ValueError: the run is shorter than `dropped`.
        """
        length, num_sinks = int(self._length[row]), self.num_sink_blocks
        if dropped > max(0, length - num_sinks):
            raise ValueError(f"A delta drops {dropped} blocks of a run of {max(0, length - num_sinks)}.")
        if dropped:
            table = self._blocks[row]
            table[num_sinks : length - dropped] = table[num_sinks + dropped : length]
            table[length - dropped : length] = NO_BLOCK
            length -= dropped
        end = length + len(blocks)
        if end > self._blocks.shape[1]:
            self._widen(end)
        self._blocks[row, length:end] = blocks
        self._length[row] = end
        self._first[row] = max(first_block, num_sinks)  # a run never begins among the sink blocks

    def move(self, row: int, *, logical: int, block: int) -> None:
        """Replace the block id of logical block `logical` by `block`.

        Raises:
            ValueError: the row does not have that logical block.
        """
        first = int(self._first[row])
        column = logical if logical < self.num_sink_blocks else logical - first + self.num_sink_blocks
        in_gap = self.num_sink_blocks <= logical < first
        if in_gap or not 0 <= column < self._length[row]:
            raise ValueError(f"A plan moves logical block {logical}, which the sequence's table does not have.")
        self._blocks[row, column] = block

    def clear(self, row: int) -> None:
        """Empty a row."""
        self._blocks[row, : self._length[row]] = NO_BLOCK
        self._length[row] = 0
        self._first[row] = self.num_sink_blocks

    def add_rows(self, num_rows: int) -> None:
        """Add rows for more sequences."""
        more = np.full((num_rows, self._blocks.shape[1]), NO_BLOCK, dtype=np.int32)
        self._blocks = np.concatenate([self._blocks, more])
        self._length = np.concatenate([self._length, np.zeros(num_rows, dtype=np.int64)])
        self._first = np.concatenate([self._first, np.full(num_rows, self.num_sink_blocks, dtype=np.int64)])

    def gather(self, rows: Ints, end: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return the tables [B, N] and first blocks [B] of `rows`, with only the columns of blocks that begin below position
        `end` [B]."""
        length, first = self._length[rows], self._first[rows]
        num_logical = (end + self.block_size - 1) // self.block_size
        # The columns of blocks below `end`: those of the run, and those of the sink blocks.
        holding = np.maximum(0, num_logical - first)
        if self.num_sink_blocks:
            holding += np.minimum(num_logical, self.num_sink_blocks)
        valid = np.minimum(length, holding)
        table = self._blocks[rows, : max(1, int(valid.max(initial=0)))]
        if (valid < length).any():
            table[np.arange(table.shape[1]) >= valid[:, None]] = NO_BLOCK
        return table, first

    def blocks_at(self, rows: Ints, logical: Ints) -> Ints:
        """Return the block ids of these logical blocks, [..., B]; NO_BLOCK where the number is negative.

        Raises:
            ValueError: a row does not have one of them.
        """
        columns = logical - self._first[rows]
        if ((logical >= 0) & ((columns < 0) | (columns >= self._length[rows]))).any():
            raise ValueError("A plan names a logical block that its sequence's table does not have.")
        blocks: Ints = np.where(logical < 0, NO_BLOCK, self._blocks[rows, np.maximum(columns, 0)])
        return blocks

    def as_compact(self, row: int) -> CompactTable:
        """Return a row as a compact table of its own."""
        length, first, num_sinks = int(self._length[row]), int(self._first[row]), self.num_sink_blocks
        table = CompactTable(num_sink_blocks=num_sinks, remembers_gone=False)
        table.apply(dropped=0, first_block=first, blocks=self._blocks[row, :length].tolist())
        return table

    def columns(self, logical: Ints, first: Ints) -> Ints:
        """Return the column of each logical block, given its row's first block; the column is out of range if the row has no such
        block."""
        run = logical - first + self.num_sink_blocks
        if self.num_sink_blocks == 0:
            return run
        return np.where(logical < self.num_sink_blocks, logical, np.where(logical < first, -1, run))

    def _widen(self, num_columns: int) -> None:
        # At least twice as many, so that growing rows copy the table only a few times.
        more = max(num_columns, 2 * self._blocks.shape[1]) - self._blocks.shape[1]
        padding = np.full((self._blocks.shape[0], more), NO_BLOCK, dtype=np.int32)
        self._blocks = np.concatenate([self._blocks, padding], axis=1)


class CompactTable:
    """A compact table. Plans update it as they update ordinary tables (`StepPlan`), and may also remove single blocks."""

    def __init__(self, *, num_sink_blocks: int, remembers_gone: bool) -> None:
        self.num_sink_blocks = num_sink_blocks
        self.logical: list[int] = []  # of each column
        self.blocks: list[int] = []  # of each column
        self.gone: dict[int, int] = {}  # logical block -> block id, of blocks that have left the table
        self._remembers_gone = remembers_gone
        self._next = 0  # the logical block after the last one that was appended

    def apply(self, *, dropped: int, first_block: int, blocks: list[int]) -> None:
        """Drop `dropped` blocks from the front of the run, then append `blocks`; an empty run begins at `first_block`.

        Raises:
            ValueError: the run is shorter than `dropped`.
        """
        run = bisect_left(self.logical, self.num_sink_blocks)
        if dropped > len(self.logical) - run:
            raise ValueError(f"A delta drops {dropped} blocks of a run of {len(self.logical) - run}.")
        for _ in range(dropped):
            self._take(run)
        for block in blocks:
            if self._next >= self.num_sink_blocks and len(self.logical) == run:
                self._next = max(self._next, first_block)
            run += self._next < self.num_sink_blocks  # this block is a sink block, so the run begins one column later
            self.logical.append(self._next)
            self.blocks.append(block)
            self._next += 1

    def remove(self, logical: int) -> None:
        """Take one logical block out of the table.

        Raises:
            ValueError: the table does not have it.
        """
        self._take(self._column(logical))

    def move(self, *, logical: int, block: int) -> None:
        """Replace the block id of a logical block, which may be one that has gone.

        Raises:
            ValueError: the sequence has no such block.
        """
        if logical in self.gone:
            self.gone[logical] = block
        else:
            self.blocks[self._column(logical)] = block

    def with_gone(self) -> CompactTable:
        """Return a table that has the blocks of this table and also those that have left it."""
        whole = CompactTable(num_sink_blocks=self.num_sink_blocks, remembers_gone=False)
        merged = {**self.gone, **dict(zip(self.logical, self.blocks, strict=True))}
        whole.logical = sorted(merged)
        whole.blocks = [merged[logical] for logical in whole.logical]
        return whole

    def block_of(self, logical: int) -> int | None:
        """Return the block id of a logical block, or None if the table does not have it."""
        column = bisect_left(self.logical, logical)
        has_it = column < len(self.logical) and self.logical[column] == logical
        return self.blocks[column] if has_it else None

    def _column(self, logical: int) -> int:
        column = bisect_left(self.logical, logical)
        if column == len(self.logical) or self.logical[column] != logical:
            raise ValueError(f"A plan names logical block {logical}, which the sequence's table does not have.")
        return column

    def _take(self, column: int) -> None:
        logical, block = self.logical.pop(column), self.blocks.pop(column)
        if self._remembers_gone:
            self.gone[logical] = block

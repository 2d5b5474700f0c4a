"""Keeps the compact block table of a sequence with a KV policy, for one group. A policy may remove blocks anywhere in the table.

A *compact* table has one column for each block that is left, with the block's logical number (position // block size), in ascending
order. The first columns are the policy's sink blocks, which hold the sequence's first tokens; the columns after them are the *run*.
Example with one sink column, after blocks 1 to 4 left at the front of the run and block 6 was removed:

    logical block     0   5   7   8
    block id         17   3  20   9

Measured rows (`policy_report`) also read the blocks that a policy has dropped: the tables of their sequences remember these in
`gone`.
"""

from __future__ import annotations

from bisect import bisect_left


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

"""A block table as runs of consecutive block ids, kept up to date from what was appended."""

from __future__ import annotations

from transom_worker.blockmap.snapshot import TablePieces

Run = tuple[int, int, int]  # first logical index, first block, count


class TableRuns:
    """One sequence's blocks in one group."""

    __slots__ = ("_first_block", "num_pinned", "runs")

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.num_pinned = 0
        self._first_block = 0

    def update(self, table: TablePieces) -> None:
        """Take what changed. `runs` is never changed in place."""
        if table.is_new:
            self.runs, self._first_block = [], 0
        self.num_pinned = table.num_pinned
        if table.pieces:
            self.runs = self.runs.copy()
        if table.first_block != self._first_block:
            self._trim(table.first_block)
        for logical, blocks in table.pieces:
            self._append(logical, blocks)

    def sliding(self) -> list[Run]:
        """Those that are not pinned."""
        return [run for run in self.runs if run[0] >= self.num_pinned]

    def _trim(self, first_block: int) -> None:
        """Drop what slid out: all from the pinned blocks' end up to `first_block`."""
        self._first_block = first_block
        kept = []
        for logical, block, count in self.runs:
            if logical >= self.num_pinned and logical < first_block:
                cut = min(count, first_block - logical)
                logical, block, count = logical + cut, block + cut, count - cut
            if count:
                kept.append((logical, block, count))
        self.runs = kept

    def _append(self, logical: int, blocks: list[int]) -> None:
        runs = self.runs
        at = 0
        while at < len(blocks):
            first, end = blocks[at], at + 1
            while end < len(blocks) and blocks[end] == first + end - at:
                end += 1
            count = end - at
            slides = logical + at == self.num_pinned  # the block before it does not
            if runs and not slides and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (logical + at, first):
                before = runs.pop()
                first, count = before[1], before[2] + count
                runs.append((before[0], first, count))
            else:
                runs.append((logical + at, first, count))
            at = end

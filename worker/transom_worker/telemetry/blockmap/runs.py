"""`TableRuns`: keeps a sequence's block table as runs of consecutive block ids, which take less room in a frame of the block map.

Example: the blocks 40, 41, 42 and 7 at logical indices 3 to 6 are the runs (3, 40, 3) and (6, 7, 1).
"""

from transom_worker.telemetry.blockmap.snapshot import TablePieces

Run = tuple[int, int, int]  # first logical index, first block, count


class TableRuns:
    """The runs of one sequence's block table in one group: those of sink blocks, which stay, and then those of the blocks that
    slide out of the window one after the other."""

    __slots__ = ("_first_block", "num_sink_blocks", "runs")

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.num_sink_blocks = 0
        self._first_block = 0

    def update(self, table: TablePieces) -> None:
        """Apply a snapshot's changes of the table. `runs` is replaced, and never changed in place."""
        if table.is_new:
            self.runs, self._first_block = [], 0
        self.num_sink_blocks = table.num_sink_blocks
        if table.pieces:
            self.runs = self.runs.copy()
        if table.first_block != self._first_block:
            self._trim(table.first_block)
        for logical, blocks in table.pieces:
            self._append(logical, blocks)

    def sliding(self) -> list[Run]:
        """Return the runs after the sink blocks."""
        return [run for run in self.runs if run[0] >= self.num_sink_blocks]

    def _trim(self, first_block: int) -> None:
        """Drop the blocks that slid out of the window: from the end of the sink blocks up to `first_block`."""
        self._first_block = first_block
        runs = self.runs
        begin = 0
        while begin < len(runs) and runs[begin][0] < self.num_sink_blocks:
            begin += 1
        end = begin
        while end < len(runs) and runs[end][0] + runs[end][2] <= first_block:
            end += 1
        self.runs = [*runs[:begin], *runs[end:]]
        if end < len(runs) and (cut := first_block - runs[end][0]) > 0:
            logical, block, count = runs[end]
            self.runs[begin] = (logical + cut, block + cut, count - cut)

    def _append(self, logical: int, blocks: list[int]) -> None:
        """Append blocks from this logical index on; consecutive ids extend the last run."""
        runs = self.runs
        at = 0
        while at < len(blocks):
            first, end = blocks[at], at + 1
            while end < len(blocks) and blocks[end] == first + end - at:
                end += 1
            count = end - at
            # The first block after the sink blocks begins a run of its own, even if its id follows: sink blocks are never trimmed.
            slides = logical + at == self.num_sink_blocks
            if runs and not slides and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (logical + at, first):
                before = runs.pop()
                first, count = before[1], before[2] + count
                runs.append((before[0], first, count))
            else:
                runs.append((logical + at, first, count))
            at = end

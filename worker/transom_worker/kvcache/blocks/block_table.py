"""Block tables: which blocks a sequence holds in one KV cache group, and which changes the ranks do not know yet.

A table has a sequence's first blocks, the *sink blocks*, if the group has attention sinks, and then the *run*, the logical blocks
after them. Blocks that slide out of a window are dropped from the run's front. A *logical* index is a block's index in its
sequence; a block's *id* says where it is in the arena.

A table with 1 sink block, after 6 blocks, of which 2 slid out:

    logical    0         1  2        3         4         5
    id         17        (slid out)  40        41        23
               sink_blocks           run, first_block = 3           end_block = 6

The run of a `GappedBlockTable` has gaps where a KV policy removed blocks. If the policy is compared with full attention, blocks
that left the table are put *aside*: they keep their contents. Example, after 1, 2, 4 and 5 of the logical blocks 1 to 8 were
removed:

    logical    0         3   6   7   8
    id         17        40  23  41  18
               sink      run, logicals = [3, 6, 7, 8]               end_block = 9

A `StateTable` has snapshots of recurrent layers. Its last block is updated in place; those before it are snapshots that are kept,
until no step in flight reads them. Its logical indices count the blocks since the sequence's start. Example with hash blocks of 16
tokens, after a hit of 64 tokens and a checkpoint at 96:

    logical    0              1              2
    id         17             40             23
               snapshot at    snapshot at    written from token 96 on
               64: the hit    96             ends = [64, 96]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HOLE = -1
"""Instead of a block id. In a table: the block's contents are in the host tier, and their load has not started. In a delta: the
same plan removes the block."""


class TableDelta(NamedTuple):
    """A table's change as `StepPlan` carries it: drop `dropped` blocks from the run's front, then append the blocks `appended`.
    After that the run starts at logical block `first_block`."""

    dropped: int
    appended: list[int]
    first_block: int


@dataclass(slots=True)
class BlockTable:
    """One group's block ids: `sink_blocks` are logical blocks 0 to `num_sink_blocks - 1`, `run` those from `first_block` on."""

    num_sink_blocks: int
    first_block: int
    sink_blocks: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    # Since the last `take_...`: ids of appended blocks, number of blocks dropped from the run's front, logical index -> new block
    # id of moved blocks that the ranks know, and logical indices of removed blocks.
    _appended: list[int] = field(default_factory=list)
    _dropped: int = 0
    _moved: dict[int, int] = field(default_factory=dict)
    _removed: list[int] = field(default_factory=list)
    # Logical index -> id, of blocks that left the table and keep their contents.
    aside: dict[int, int] = field(default_factory=dict)

    @property
    def end_block(self) -> int:
        """One past the table's last logical block."""
        return (
            len(self.sink_blocks) if len(self.sink_blocks) < self.num_sink_blocks else self.first_block + len(self.run)
        )

    @property
    def run_logicals(self) -> Sequence[int]:
        """The logical indices of the run's blocks."""
        return range(self.first_block, self.first_block + len(self.run))

    @property
    def last(self) -> int | None:
        """The block id at the table's end; None if the table is empty."""
        return self.run[-1] if self.run else self.sink_blocks[-1] if self.sink_blocks else None

    def at(self, logical: int) -> int | None:
        """Return the block id of a logical block; None if it slid out or is not allocated yet."""
        if logical < self.num_sink_blocks:
            return self.sink_blocks[logical] if logical < len(self.sink_blocks) else None
        offset = logical - self.first_block
        return self.run[offset] if 0 <= offset < len(self.run) else None

    def num_missing(self, end: int, block_size: int) -> int:
        """Return how many blocks the table lacks for positions below `end`."""
        return max(0, -(-end // block_size) - self.end_block)

    def blocks(self, begin: int, end: int) -> list[int | None]:
        """Return the block ids of logical blocks `[begin, end)`, with None for each that slid out or is not allocated yet."""
        first = begin - self.first_block
        if begin >= self.num_sink_blocks and first >= 0 and end - self.first_block <= len(self.run):
            return [*self.run[first : end - self.first_block]]
        return [self.at(logical) for logical in range(begin, end)]

    def logical_of(self, block: int) -> int:
        """Return the logical index of a block id, which must be in the table or aside."""
        if block in self.sink_blocks:
            return self.sink_blocks.index(block)
        if block in self.run:
            return self.first_block + self.run.index(block)
        return next(logical for logical, aside in self.aside.items() if aside == block)

    def append(self, blocks: list[int]) -> None:
        """Append block ids: sink blocks first, until all of them are there, then the run."""
        missing = self.num_sink_blocks - len(self.sink_blocks)
        self.sink_blocks += blocks[:missing]
        self.run += blocks[missing:]
        self._appended += blocks

    def live(self, end: int) -> list[int]:
        """Return the ids of the table's blocks before logical block `end`, in order, and then those of the blocks aside."""
        run = [block for logical, block in zip(self.run_logicals, self.run, strict=True) if logical < end]
        return [*self.sink_blocks[:end], *run, *self.aside.values()]

    def with_holes(self, end: int) -> BlockTable:
        """Return a table that the ranks do not know, with a hole for each block of `live(end)`."""
        num_in_run = sum(logical < end for logical in self.run_logicals)
        return BlockTable(
            num_sink_blocks=self.num_sink_blocks,
            first_block=self.first_block,
            sink_blocks=[HOLE] * min(end, len(self.sink_blocks)),
            run=[HOLE] * num_in_run,
        )

    def fill_holes(self, blocks: Sequence[int]) -> None:
        """Replace the table's holes by block ids, in the order of `live`; the ranks do not know the table yet."""
        given = iter(blocks)
        for part in (self.sink_blocks, self.run):
            part[:] = [next(given) if block == HOLE else block for block in part]
        self.aside = {logical: next(given) if block == HOLE else block for logical, block in self.aside.items()}
        self._append_all()

    def drop_until(self, first: int) -> list[tuple[int, int]]:
        """Drop the run's blocks before logical block `first`; return (logical index, block id) of each, ascending."""
        count = min(first - self.first_block, len(self.run))
        if count <= 0:
            return []
        dropped = list(enumerate(self.run[:count], start=self.first_block))
        del self.run[:count]
        self.first_block += count
        self._dropped += count
        return dropped

    def replace(self, logical: int, block: int) -> None:
        """Note that compaction moved the block at a logical index of the table to another block id."""
        first_unknown = self.end_block - len(self._appended)  # the ranks do not know the blocks from here on
        if logical < self.num_sink_blocks:
            self.sink_blocks[logical] = self._moved[logical] = block
            return
        if logical in self.aside:
            self.aside[logical] = self._moved[logical] = block
            return
        self._set_in_run(logical, block)
        if logical >= first_unknown:
            self._appended[logical - first_unknown] = block
        else:
            self._moved[logical] = block

    def take_moves(self) -> list[tuple[int, int]]:
        """Return (logical index, block id) of the blocks that moved since the last call and are still in the table or aside."""
        moves = [move for move in self._moved.items() if self.at(move[0]) is not None or move[0] in self.aside]
        self._moved = {}
        return moves

    def take_delta(self) -> TableDelta | None:
        """Return what was appended and dropped since the last call; None if nothing was."""
        if not self._appended and not self._dropped:
            return None
        delta = TableDelta(self._dropped, self._appended, self.first_block)
        self._appended, self._dropped = [], 0
        return delta

    def take_removed(self) -> list[int]:
        """Return the logical indices of blocks that were removed since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def holds(self, block: int) -> bool:
        """Return whether a block id is in the table or aside."""
        return block in self.run or block in self.sink_blocks or block in self.aside.values()

    def take_all(self) -> list[int]:
        """Empty the table; return its block ids without holes, the last ones of the table first, and then those aside."""
        blocks = [*reversed(self.run), *reversed(self.sink_blocks), *self.aside.values()]
        self.sink_blocks, self.run, self.aside = [], [], {}
        return [block for block in blocks if block != HOLE]

    def _set_in_run(self, logical: int, block: int) -> None:
        self.run[logical - self.first_block] = block

    def _append_all(self) -> None:
        """Let the next delta give the ranks the whole table."""
        self._appended = self.sink_blocks + self.run


@dataclass(slots=True)
class GappedBlockTable(BlockTable):
    """A block table whose run has gaps; `logicals[i]` is the logical index of `run[i]`, ascending."""

    logicals: list[int] = field(default_factory=list)
    end: int = 0  # one past the last logical block that was ever in the run

    @property
    def end_block(self) -> int:
        """One past the last logical block that was appended, removed or not."""
        return max(self.end, len(self.sink_blocks))

    @property
    def run_logicals(self) -> Sequence[int]:
        """The logical indices of the run's blocks."""
        return self.logicals

    def at(self, logical: int) -> int | None:
        """Return the block id of a logical block; None if it was removed or is not allocated yet."""
        if logical < self.num_sink_blocks:
            return self.sink_blocks[logical] if logical < len(self.sink_blocks) else None
        offset = bisect_left(self.logicals, logical)
        return self.run[offset] if offset < len(self.run) and self.logicals[offset] == logical else None

    def blocks(self, begin: int, end: int) -> list[int | None]:
        """Return the block ids of logical blocks `[begin, end)`, with None for each that was removed or is not allocated yet."""
        return [self.at(logical) for logical in range(begin, end)]

    def logical_of(self, block: int) -> int:
        """Return the logical index of a block id, which must be in the table or aside."""
        return self.logicals[self.run.index(block)] if block in self.run else BlockTable.logical_of(self, block)

    def append(self, blocks: list[int]) -> None:
        """Append block ids: sink blocks first, until all of them are there, then the run."""
        begin, num_before = max(self.end_block, self.first_block), len(self.run)
        BlockTable.append(self, blocks)
        if len(self.run) > num_before:
            self.end = begin + len(self.run) - num_before
            self.logicals += range(begin, self.end)

    def with_holes(self, end: int) -> GappedBlockTable:
        """Return a table that the ranks do not know, with a hole for each block of `live(end)`."""
        logicals = [logical for logical in self.logicals if logical < end]
        return GappedBlockTable(
            num_sink_blocks=self.num_sink_blocks,
            first_block=self.first_block,
            sink_blocks=[HOLE] * min(end, len(self.sink_blocks)),
            run=[HOLE] * len(logicals),
            aside=dict.fromkeys(self.aside, HOLE),
            logicals=logicals,
            end=min(self.end, end),
        )

    def drop_until(self, first: int) -> list[tuple[int, int]]:
        """Remove the run's blocks before logical block `first`; return (logical index, block id) of each, ascending."""
        return self.remove(self.logicals[: bisect_left(self.logicals, first)])

    def remove(self, logicals: Sequence[int]) -> list[tuple[int, int]]:
        """Remove blocks of the run; return (logical index, block id) of each, ascending."""
        gone = set(logicals)
        pairs = list(zip(self.logicals, self.run, strict=True))
        removed = [pair for pair in pairs if pair[0] in gone]
        assert len(removed) == len(gone)
        kept = [pair for pair in pairs if pair[0] not in gone]
        self.logicals, self.run = [logical for logical, _ in kept], [block for _, block in kept]
        self._removed += sorted(gone)
        return removed

    def take_all(self) -> list[int]:
        """Empty the table; return its block ids as `BlockTable.take_all` does."""
        self.logicals = []
        return BlockTable.take_all(self)

    def _set_in_run(self, logical: int, block: int) -> None:
        self.run[bisect_left(self.logicals, logical)] = block

    def _append_all(self) -> None:
        """Let the next delta give the ranks every logical block that was ever in the table, and let the next removals name those
        that have left it. In the delta these have the id `HOLE`, unless they are aside."""
        held = dict(zip(self.logicals, self.run, strict=True))
        gaps = [logical for logical in range(self.first_block, self.end) if logical not in held]
        run = range(self.first_block, self.end)
        self._appended = self.sink_blocks + [held.get(one, self.aside.get(one, HOLE)) for one in run]
        self._removed = gaps


@dataclass(slots=True)
class StateTable(BlockTable):
    """The snapshots of a group of recurrent layers: `ends[i]` is the number of tokens after which `run[i]` was not written any
    more. The last block has no end, unless a snapshot is all that the table has yet. Ends are multiples of `block_size`."""

    block_size: int = 0  # tokens of a hash block
    ends: list[int] = field(default_factory=list)
    _last_end: int = 0  # of the snapshots that were dropped

    def num_missing(self, end: int, block_size: int) -> int:
        """Return 1 if the table has no block to write, else 0: no number of tokens takes more."""
        return int(len(self.ends) == len(self.run))

    def keep(self, end: int) -> None:
        """Keep the state after `end` tokens in the last block but one, since the row that begins there writes the last block."""
        self.ends.append(end)
        assert len(self.ends) == len(self.run) - 1

    @property
    def places(self) -> list[int]:
        """The hash blocks that the run's blocks stand for: the last one before a snapshot, and the next one of the last block."""
        last = [self.ends[-1] if self.ends else self._last_end] if len(self.run) > len(self.ends) else []
        return [*(end // self.block_size - 1 for end in self.ends), *(begin // self.block_size for begin in last)]

    def read_by(self, start: int) -> int | None:
        """Return the logical index of the block that a row from position `start` on begins with; None: its state begins at zero."""
        return self.first_block + bisect_left(self.ends, start) if start else None

    def written_by(self, start: int) -> int:
        """Return the logical index of the block that a row from position `start` on writes."""
        return self.first_block + bisect_right(self.ends, start)

    def blocks(self, begin: int, end: int) -> list[int | None]:
        """Return the snapshots at the ends of hash blocks `[begin, end)`, with None where there is none."""
        snapshots = dict(zip(self.ends, self.run, strict=False))
        return [snapshots.get((at + 1) * self.block_size) for at in range(begin, end)]

    def live(self, end: int) -> list[int]:
        """Return the block that has the state after `end` tokens."""
        return self.run[bisect_left(self.ends, end) :][:1] if end else []

    def with_holes(self, end: int) -> StateTable:
        """Return a table that the ranks do not know, whose only block is a hole to be written in place."""
        return StateTable(0, 0, run=[HOLE] * len(self.live(end)), block_size=self.block_size)

    def drop_until(self, first: int) -> list[tuple[int, int]]:
        """Drop the snapshots at the ends of hash blocks before `first`; return (logical index, block id) of each."""
        num_dropped = bisect_right(self.ends, first * self.block_size)
        self._last_end = max([self._last_end, *self.ends[:num_dropped]])
        del self.ends[:num_dropped]
        return BlockTable.drop_until(self, self.first_block + num_dropped)

    def take_all(self) -> list[int]:
        """Empty the table; return its block ids as `BlockTable.take_all` does."""
        self.ends = []
        return BlockTable.take_all(self)

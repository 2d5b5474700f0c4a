"""One sequence's block tables, and what changed in them since the ranks were last told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transom_worker.kvcache.prefix_search import PrefixHit
from transom_worker.kvcache.retention import Retention
from transom_worker.kvcache.tree import CheckpointKind, Node


class TableDelta(NamedTuple):
    """A change as `StepPlan` carries it: drop from the run's front, append at the end; the run then starts at `first_block`."""

    dropped: int
    appended: list[int]
    first_block: int


@dataclass(slots=True)
class BlockTable:
    """Pinned blocks (logical 0 ... num_sink_blocks - 1), then the run: logical blocks from `first_block` on."""

    num_sink_blocks: int
    first_block: int
    sink_blocks: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    _appended: list[int] = field(default_factory=list)
    _dropped: int = 0
    _moved: dict[int, int] = field(default_factory=dict)  # logical -> block, of those that ranks know

    @property
    def end_block(self) -> int:
        """One past the last logical block that has a block."""
        return (
            len(self.sink_blocks) if len(self.sink_blocks) < self.num_sink_blocks else self.first_block + len(self.run)
        )

    @property
    def last(self) -> int | None:
        """The block id at the table's end."""
        return self.run[-1] if self.run else self.sink_blocks[-1] if self.sink_blocks else None

    def at(self, logical: int) -> int | None:
        """The block id of a logical block, None if it slid out or is not there yet."""
        if logical < self.num_sink_blocks:
            return self.sink_blocks[logical] if logical < len(self.sink_blocks) else None
        offset = logical - self.first_block
        return self.run[offset] if 0 <= offset < len(self.run) else None

    def blocks(self, begin: int, end: int) -> list[int | None]:
        """The block ids of logical blocks `[begin, end)`, None where there is none."""
        first = begin - self.first_block
        if begin >= self.num_sink_blocks and first >= 0 and end - self.first_block <= len(self.run):
            return [*self.run[first : end - self.first_block]]
        return [self.at(logical) for logical in range(begin, end)]

    def logical_of(self, block: int) -> int:
        """The logical index of a block id that is in the table."""
        if block in self.sink_blocks:
            return self.sink_blocks.index(block)
        return self.first_block + self.run.index(block)

    def append(self, blocks: list[int]) -> None:
        """Grow the table at its end."""
        missing = self.num_sink_blocks - len(self.sink_blocks)
        self.sink_blocks += blocks[:missing]
        self.run += blocks[missing:]
        self._appended += blocks

    def drop_until(self, first: int) -> list[int]:
        """Let the run start at logical block `first`; returns the blocks that fell out, in order."""
        count = min(first - self.first_block, len(self.run))
        if count <= 0:
            return []
        fallen = self.run[:count]
        del self.run[:count]
        self.first_block += count
        self._dropped += count
        return fallen

    def replace(self, logical: int, block: int) -> None:
        """Compaction moved a block that is in the table."""
        untold = self.end_block - len(self._appended)
        if logical < self.num_sink_blocks:
            self.sink_blocks[logical] = self._moved[logical] = block
            return
        self.run[logical - self.first_block] = block
        if logical >= untold:
            self._appended[logical - untold] = block
        else:
            self._moved[logical] = block

    def take_moves(self) -> list[tuple[int, int]]:
        """(logical, block) of the blocks that moved since the last call and are still in the table."""
        moves = [(logical, block) for logical, block in self._moved.items() if self.at(logical) is not None]
        self._moved = {}
        return moves

    def take_delta(self) -> TableDelta | None:
        """What changed since the last call, None if nothing."""
        if not self._appended and not self._dropped:
            return None
        delta = TableDelta(self._dropped, self._appended, self.first_block)
        self._appended, self._dropped = [], 0
        return delta


@dataclass(slots=True)
class SequenceBlocks:
    """A running sequence's share of the cache: one table per group, its hash chain and how far it got.

    A window repair replays `[repair_from, repair_until)`: until that is processed nothing is published (both 0 without repair).
    """

    tables: list[BlockTable]
    chain: list[bytes]
    root: bytes
    processed: int = 0  # tokens whose step's result arrived
    num_published: int = 0  # units that were offered to the index
    capacity_tokens: int = 0  # positions below it have blocks in every group
    next_event: int = 0  # processed tokens at which something can be published or freed
    repair_from: int = 0  # tokens
    repair_until: int = 0
    repaired: bool = False  # the replay's end was processed and published
    hit: PrefixHit | None = None  # what it began on
    planned: list[tuple[int, CheckpointKind]] = field(default_factory=list)  # boundaries ahead, in units, ascending
    base: Node | None = None  # the deepest checkpoint that it builds on, locked
    turns: int = 0  # of the conversation, as far as the cache has seen it
    changed: bool = False  # a table changed since the last `take_deltas`

    @classmethod
    def at(
        cls, hit: PrefixHit | None, chain: list[bytes], root: bytes, retentions: Sequence[Retention], *, unit: int
    ) -> SequenceBlocks:
        """Empty tables from where a hit of `unit`-token units lets a sequence start (None: at 0).

        Sliding groups that are repaired begin at the replay, their pinned blocks apart.
        """
        units, start = (hit.num_hash_blocks, hit.start) if hit else (0, 0)
        replays = start < units * unit
        tables = []
        for retention in retentions:
            first = retention.first_live_block(start)
            if replays and not retention.keeps_everything:
                first = max(retention.num_sink_blocks, start // retention.block_size)
            tables.append(BlockTable(num_sink_blocks=retention.num_sink_blocks, first_block=first))
        return cls(
            tables=tables,
            chain=chain,
            root=root,
            processed=start,
            num_published=units,
            capacity_tokens=start,
            repair_from=start if replays else 0,
            repair_until=units * unit if replays else 0,
            hit=hit,
            changed=True,
        )

    def shared_digests(self, group: int, retention: Retention, *, unit: int) -> list[bytes]:
        """Digests of the cached blocks of the group that the hit gives, in the table's order."""
        units = self.num_published
        if retention.keeps_everything:
            step = retention.block_size // unit
            return self.chain[step - 1 : units : step]
        pinned = self.chain[: min(retention.num_sink_blocks, units)]
        return pinned if self.repair_until else pinned + self.chain[self.tables[group].first_block : units]

    def take_deltas(self) -> list[tuple[int, TableDelta]]:
        """(group, delta) of every table that changed."""
        self.changed = False
        deltas = ((group, table.take_delta()) for group, table in enumerate(self.tables))
        return [(group, delta) for group, delta in deltas if delta is not None]

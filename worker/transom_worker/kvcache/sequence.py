"""The KV blocks of one running sequence: a block table per KV cache group, and how far the sequence is computed and published.

Terms:

    logical block    a block's index in its sequence; a block *id* says where it lies in the arena
    sink blocks      a sliding group's first logical blocks, which hold attention sinks and never slide out
    run              the consecutive logical blocks behind the sink blocks; blocks that slid out of a window are gone from its front
    hash block       `--block-size` tokens; its digest in the hash chain names it and all tokens before it
    published        findable in the prefix cache by other requests
    window repair    computing tokens before a hit's boundary again so that sliding groups get their blocks (`window_repair`)

A table of a group with 1 sink block after 6 blocks, of which 2 slid out:

    logical    0         1  2        3         4         5
    id         17        (slid out)  40        41        23
               sink_blocks           run, first_block = 3           end_block = 6

A table also remembers what changed since the ranks were last told: blocks appended, dropped and moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transom_worker.kvcache.prefix_search import PrefixHit, shared_digests
from transom_worker.kvcache.retention import Retention
from transom_worker.kvcache.retention_set import RetentionSet
from transom_worker.kvcache.tree import CheckpointKind, Node


class TableDelta(NamedTuple):
    """A table's change as `StepPlan` carries it: drop `dropped` blocks from the run's front, then append; then the run starts at
    `first_block`."""

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
    _appended: list[int] = field(default_factory=list)
    _dropped: int = 0
    _moved: dict[int, int] = field(default_factory=dict)  # logical index -> new block id, of blocks that the ranks know

    @property
    def end_block(self) -> int:
        """One past the table's last logical block."""
        return (
            len(self.sink_blocks) if len(self.sink_blocks) < self.num_sink_blocks else self.first_block + len(self.run)
        )

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

    def blocks(self, begin: int, end: int) -> list[int | None]:
        """Return the block ids of logical blocks `[begin, end)`, with None for each that slid out or is not allocated yet."""
        first = begin - self.first_block
        if begin >= self.num_sink_blocks and first >= 0 and end - self.first_block <= len(self.run):
            return [*self.run[first : end - self.first_block]]
        return [self.at(logical) for logical in range(begin, end)]

    def logical_of(self, block: int) -> int:
        """Return the logical index of a block id, which must be in the table."""
        if block in self.sink_blocks:
            return self.sink_blocks.index(block)
        return self.first_block + self.run.index(block)

    def append(self, blocks: list[int]) -> None:
        """Append block ids: sink blocks first, until all of them are there, then the run."""
        missing = self.num_sink_blocks - len(self.sink_blocks)
        self.sink_blocks += blocks[:missing]
        self.run += blocks[missing:]
        self._appended += blocks

    def drop_until(self, first: int) -> list[int]:
        """Drop the run's blocks below logical block `first`; return their ids, in order."""
        count = min(first - self.first_block, len(self.run))
        if count <= 0:
            return []
        dropped = self.run[:count]
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
        self.run[logical - self.first_block] = block
        if logical >= first_unknown:
            self._appended[logical - first_unknown] = block
        else:
            self._moved[logical] = block

    def take_moves(self) -> list[tuple[int, int]]:
        """Return (logical index, block id) of the blocks that moved since the last call and are still in the table."""
        moves = [(logical, block) for logical, block in self._moved.items() if self.at(logical) is not None]
        self._moved = {}
        return moves

    def take_delta(self) -> TableDelta | None:
        """Return what was appended and dropped since the last call; None if nothing was."""
        if not self._appended and not self._dropped:
            return None
        delta = TableDelta(self._dropped, self._appended, self.first_block)
        self._appended, self._dropped = [], 0
        return delta


@dataclass(slots=True)
class SequenceBlocks:
    """What a running sequence holds in the KV cache: one block table per group, its hash chain, and how far it is computed.

    A window repair computes tokens `[repair_from, repair_until)` again; until `repair_until` is processed nothing is published.
    Both are 0 without a repair.
    """

    tables: list[BlockTable]
    retentions: RetentionSet
    chain: list[bytes]
    root: bytes
    processed: int = 0  # tokens whose step has answered
    num_published: int = 0  # leading hash blocks that were published
    capacity_tokens: int = 0  # positions below it have blocks in every group
    next_event_at: int = 0  # at this number of processed tokens something can be published or freed
    repair_from: int = 0  # first token of the window repair
    repair_until: int = 0  # one past its last token
    repair_done: bool = False  # the repair's end was processed and its blocks are published
    hit: PrefixHit | None = None  # the hit that the sequence started from
    planned_checkpoints: list[tuple[int, CheckpointKind]] = field(default_factory=list)  # ahead; hash blocks, ascending
    base_node: Node | None = None  # the deepest node of the prefix tree on the sequence's chain; the sequence locks it
    num_returns: int = (
        0  # earlier requests of the conversation that continued from a checkpoint, as far as the cache knows
    )
    tables_changed: bool = False  # a table changed since the last `take_deltas`

    @classmethod
    def at(
        cls, hit: PrefixHit | None, chain: list[bytes], root: bytes, retentions: RetentionSet, *, block_size: int
    ) -> SequenceBlocks:
        """Return empty tables for a sequence that starts at a hit (None: at token 0); `block_size` is that of a hash block.

        Where the hit needs a window repair, the runs of sliding groups begin at the repair's start.
        """
        num_hash_blocks, start = (hit.num_hash_blocks, hit.start) if hit else (0, 0)
        needs_repair = hit is not None and hit.needs_repair(block_size)
        tables = []
        for retention in retentions:
            first = retention.first_live_block(start)
            if needs_repair and not retention.keeps_everything:
                first = max(retention.num_sink_blocks, start // retention.block_size)
            tables.append(BlockTable(num_sink_blocks=retention.num_sink_blocks, first_block=first))
        return cls(
            tables=tables,
            retentions=retentions,
            chain=chain,
            root=root,
            processed=start,
            num_published=num_hash_blocks,
            capacity_tokens=start,
            repair_from=start if needs_repair else 0,
            repair_until=num_hash_blocks * block_size if needs_repair else 0,
            hit=hit,
            tables_changed=True,
        )

    @property
    def needs_repair(self) -> bool:
        """Whether the sequence started with a window repair."""
        return self.repair_until > 0

    @property
    def is_repairing(self) -> bool:
        """Whether a window repair's blocks are not published yet."""
        return self.needs_repair and not self.repair_done

    @property
    def first_hash_block_to_publish(self) -> int:
        """The first hash block that this sequence is going to publish, at admission.

        A window repair publishes the windows of the hit's last hash block; otherwise publishing begins behind the hit.
        """
        return self.num_published - 1 if self.needs_repair else self.num_published

    def shared_digests(self, retention: Retention, *, block_size: int) -> Sequence[bytes]:
        """Return the digests of the cached blocks that the hit gives to a group, in the table's order."""
        return shared_digests(retention, self.chain, self.hit, block_size=block_size) if self.hit else []

    def take_deltas(self) -> list[tuple[int, TableDelta]]:
        """Return (group, delta) of every table that changed since the last call."""
        self.tables_changed = False
        deltas = ((group, table.take_delta()) for group, table in enumerate(self.tables))
        return [(group, delta) for group, delta in deltas if delta is not None]

"""`SequenceBlocks`: what one sequence holds in the KV cache: a block table per group, its chain, and how far it is computed.

Terms (the others are in `kvcache`):

    hole        a logical block whose contents are in the host tier; the table has no block for it before its load starts
    load        the copies of all holes of a sequence from the host tier to the device; the ranks make them while steps run
    KV policy   a request's own rule for which blocks it keeps

A sequence's `BlocksState` says where its blocks are. `KvCache` changes it, always by `SequenceBlocks.move_to`:

    begin                                                     begin, if the hit has blocks in the host tier
      |                                                            |
      v                                                            v
    READY <----- finish_load ----- LOADING <-- start_load -- AWAITS_LOAD
      |                               ^
      | swap_out                      | swap_in
      v                               |
    SWAPPED --------------------------+

    release         READY or AWAITS_LOAD -> RELEASED
    drop_swapped    SWAPPED -> RELEASED

If the ranks are restarted while a sequence is LOADING, it becomes READY with unknown contents until it is released.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from transom_core.client_queue import NO_CLIENT, Sharer
from transom_core.kv_cache.prefix_search import PrefixHit, shared_digests
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.retention_set import RetentionSet
from transom_worker.kvcache.blocks.block_table import BlockTable, GappedBlockTable, StateTable, TableDelta
from transom_worker.kvcache.policy_retentions import BoundedRetention
from transom_worker.kvcache.prefix.tree import CheckpointKind, Node


class BlocksState(Enum):
    """Where a sequence's blocks are; the module's docstring has the picture."""

    READY = auto()  # all on the device: a step may compute the sequence
    AWAITS_LOAD = auto()  # some in the host tier, and their load has not started
    LOADING = auto()  # the ranks copy them to the device
    SWAPPED = auto()  # all in the host tier
    RELEASED = auto()  # the sequence holds none


TRANSITIONS: dict[BlocksState, tuple[BlocksState, ...]] = {
    BlocksState.READY: (BlocksState.AWAITS_LOAD, BlocksState.SWAPPED, BlocksState.RELEASED),
    BlocksState.AWAITS_LOAD: (BlocksState.LOADING, BlocksState.RELEASED),
    BlocksState.LOADING: (BlocksState.READY,),
    BlocksState.SWAPPED: (BlocksState.LOADING, BlocksState.RELEASED),
    BlocksState.RELEASED: (),
}
"""State -> the states that may follow it."""


@dataclass(slots=True)
class Repair:
    """A window repair: tokens `[start, end)` are computed again. Nothing is published before `end` is processed.

    Both are 0 for a sequence without a repair.
    """

    start: int = 0
    end: int = 0
    is_published: bool = False  # `end` was processed, and the blocks that the repair restores are published

    @property
    def is_needed(self) -> bool:
        """Whether the sequence started with a window repair."""
        return self.end > 0

    @property
    def is_under_way(self) -> bool:
        """Whether the repair's blocks are not published yet."""
        return self.is_needed and not self.is_published


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """What a sequence has in the host tier: for each group the host's block ids, in the order of the table's holes.

    `ticket` is the number of the load in plans and results; 0 before it starts.
    """

    host_blocks: Sequence[Sequence[int]] = ()
    ticket: int = 0


NOTHING_TO_LOAD = PendingLoad()


@dataclass(slots=True)
class SequenceBlocks:
    """What a sequence holds in the KV cache. Of the fields up to `sharer`, only the chain changes: it grows."""

    tables: list[BlockTable]
    retentions: RetentionSet
    chain: list[bytes]
    root: bytes
    hit: PrefixHit | None = None  # the hit from which the sequence started
    keeps_aside: bool = False  # blocks that leave a table keep their contents, so that the KV policy can be measured
    # Nothing is published, because a KV policy decides by the sequence's own attention which blocks it keeps.
    is_private: bool = False
    sharer: Sharer = NO_CLIENT  # the client whose loads these are

    state: BlocksState = BlocksState.READY
    load: PendingLoad = NOTHING_TO_LOAD
    was_swapped: bool = False  # at least once
    lost_contents: bool = False  # what its load brings is unknown (`Load.is_void`)

    processed: int = 0  # tokens whose step's result has arrived
    num_published: int = 0  # leading hash blocks that were published
    capacity_tokens: int = 0  # positions below it have blocks in every group
    next_event_at: int = 0  # at this number of processed tokens something can be published or freed
    repair: Repair = field(default_factory=Repair)
    # (boundary in hash blocks, kind) of the checkpoints that are not placed yet, ascending.
    planned_checkpoints: list[tuple[int, CheckpointKind]] = field(default_factory=list)
    base_node: Node | None = None  # the deepest node of the prefix tree on the chain; the sequence locks it
    num_returns: int = 0  # earlier requests of the conversation that continued from a checkpoint, as far as is known
    tables_changed: bool = False  # since the last `take_deltas`
    num_dropped: int = 0  # blocks that left the tables

    @classmethod
    def at(
        cls,
        hit: PrefixHit | None,
        chain: list[bytes],
        root: bytes,
        retentions: RetentionSet,
        *,
        block_size: int,
        keeps_aside: bool = False,
        sharer: Sharer = NO_CLIENT,
    ) -> SequenceBlocks:
        """Return empty tables for a sequence that starts at a hit (None: at token 0); `block_size` is that of a hash block.

        If the hit needs a window repair, the runs of sliding groups begin at the repair's start.
        """
        num_hash_blocks, start = (hit.num_hash_blocks, hit.start) if hit else (0, 0)
        needs_repair = hit is not None and hit.needs_repair(block_size)
        tables: list[BlockTable] = []
        for retention in retentions:
            if retention.spec.is_state:
                tables.append(StateTable(0, 0, block_size=block_size, ends=[start] if start else []))
                continue
            first = retention.first_live_block(start)
            if needs_repair and not retention.keeps_everything:
                first = max(retention.num_sink_blocks, start // retention.block_size)
            has_gaps = keeps_aside or isinstance(retention, BoundedRetention)
            kind = GappedBlockTable if has_gaps else BlockTable
            tables.append(kind(num_sink_blocks=retention.num_sink_blocks, first_block=first))
        return cls(
            tables=tables,
            retentions=retentions,
            chain=chain,
            root=root,
            hit=hit,
            keeps_aside=keeps_aside,
            is_private=any(isinstance(retention, BoundedRetention) for retention in retentions),
            sharer=sharer,
            processed=start,
            num_published=num_hash_blocks,
            capacity_tokens=start,
            repair=Repair(start, num_hash_blocks * block_size) if needs_repair else Repair(),
            tables_changed=True,
        )

    def move_to(self, state: BlocksState, load: PendingLoad = NOTHING_TO_LOAD) -> None:
        """Change the state, and replace `load`. Raises RuntimeError if `TRANSITIONS` does not allow the change, which is a bug."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"the blocks of a sequence are {self.state.name} and cannot become {state.name}")
        self.state, self.load = state, load

    @property
    def can_be_swapped(self) -> bool:
        """Whether the contents are worth keeping: they are inexact during a window repair, and unknown if `lost_contents`."""
        return not (self.repair.is_under_way or self.lost_contents)

    @property
    def first_hash_block_to_publish(self) -> int:
        """The first hash block that this sequence is going to publish, at admission.

        A window repair publishes the windows of the hit's last hash block; without one, publishing begins after the hit.
        """
        return self.num_published - 1 if self.repair.is_under_way else self.num_published

    def shared_digests(self, retention: Retention, *, block_size: int) -> Sequence[bytes]:
        """Return the digests of the cached blocks that the hit gives to a group, in the table's order."""
        return shared_digests(retention, self.chain, self.hit, block_size=block_size) if self.hit else []

    def live_blocks(self) -> list[list[int]]:
        """Return, by group, the blocks on the device that a sequence needs to continue: the blocks of its tables up to the last
        processed token, and those aside."""
        return [table.live(end) for table, end in self._ends()]

    def tables_with_holes(self) -> list[BlockTable]:
        """Return tables with a hole for each live block, in the order of `live_blocks`."""
        return [table.with_holes(end) for table, end in self._ends()]

    def _ends(self) -> Iterator[tuple[BlockTable, int]]:
        """Yield each table, and one past its last logical block with a processed token; for snapshots the number of tokens."""
        for retention, table in zip(self.retentions, self.tables, strict=True):
            yield table, self.processed if retention.spec.is_state else -(-self.processed // retention.block_size)

    def take_deltas(self) -> list[tuple[int, TableDelta]]:
        """Return (group, delta) of every table that changed since the last call."""
        self.tables_changed = False
        deltas = ((group, table.take_delta()) for group, table in enumerate(self.tables))
        return [(group, delta) for group, delta in deltas if delta is not None]

    def take_removed(self) -> list[tuple[int, int]]:
        """Return (group, logical index) of every block that a KV policy removed since the last call."""
        return [(group, logical) for group, table in enumerate(self.tables) for logical in table.take_removed()]

"""The KV blocks of one running sequence: a block table per KV cache group, its chain, and how far it is computed and published.

Terms:

    logical block    a block's index in its sequence; a block *id* says where it lies in the arena
    sink blocks      a sequence's first blocks, which hold attention sinks and never slide out
    hash block       `--block-size` tokens; its digest in the hash chain names it and all tokens before it
    published        findable in the prefix cache by other requests
    window repair    computing tokens before a hit's boundary again so that sliding groups get their blocks (`window_repair`)
    KV policy        a request's own rule for which blocks it keeps
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transom_core.kv_cache.prefix_search import PrefixHit, shared_digests
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.retention_set import RetentionSet
from transom_worker.kvcache.blocks.block_table import BlockTable, GappedBlockTable, TableDelta
from transom_worker.kvcache.bounded_retention import BoundedRetention
from transom_worker.kvcache.prefix.tree import CheckpointKind, Node

HOLE = -1  # in a table: a logical block whose contents are in the host tier, before its load starts


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
    is_private: bool = (
        False  # nothing is published, since a KV policy chooses by the sequence's own history what it keeps
    )
    num_dropped: int = 0  # blocks that left the tables
    keeps_aside: bool = False  # blocks that leave a table keep their contents, so that the policy can be measured
    to_load: list[list[int]] = field(
        default_factory=list
    )  # by group: the host's blocks for the tables' holes, in order
    was_swapped: bool = False  # at least once
    lost_contents: bool = False  # what its load brings is not known; it must not be swapped again
    load_ticket: int = 0  # of the load that fills the holes; 0: it has not started, or there is none

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
            has_gaps = keeps_aside or isinstance(retention, BoundedRetention)
            kind = GappedBlockTable if has_gaps else BlockTable
            tables.append(kind(num_sink_blocks=retention.num_sink_blocks, first_block=first))
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
            keeps_aside=keeps_aside,
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
        return self.num_published - 1 if self.is_repairing else self.num_published

    def shared_digests(self, retention: Retention, *, block_size: int) -> Sequence[bytes]:
        """Return the digests of the cached blocks that the hit gives to a group, in the table's order."""
        return shared_digests(retention, self.chain, self.hit, block_size=block_size) if self.hit else []

    def take_deltas(self) -> list[tuple[int, TableDelta]]:
        """Return (group, delta) of every table that changed since the last call."""
        self.tables_changed = False
        deltas = ((group, table.take_delta()) for group, table in enumerate(self.tables))
        return [(group, delta) for group, delta in deltas if delta is not None]

    def take_removed(self) -> list[tuple[int, int]]:
        """Return (group, logical index) of every block that a KV policy removed since the last call."""
        return [(group, logical) for group, table in enumerate(self.tables) for logical in table.take_removed()]

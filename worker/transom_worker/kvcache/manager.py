"""`KvCache`: the blocks of every group and sequence, and the cache that finished sequences leave behind.

A sequence `begin`s at a hit, is `extend`ed before each step, `advance`d when a step's result arrives (filled blocks are published,
those outside `live` freed) and `release`d. Blocks are freed by processed tokens only, never by scheduled ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from transom_worker.kvcache.allocator import BlockAllocator
from transom_worker.kvcache.arena import Arena
from transom_worker.kvcache.block_registry import BlockRegistry
from transom_worker.kvcache.cache_snapshot import CacheSnapshots
from transom_worker.kvcache.capacity import Capacity
from transom_worker.kvcache.checkpoints import Checkpoints
from transom_worker.kvcache.compaction import BlockCopy, Compaction
from transom_worker.kvcache.events import CacheShape, KvUpdate
from transom_worker.kvcache.eviction import EvictionPolicy, ReturnTimePolicy
from transom_worker.kvcache.layout import ArenaLayout, check_block_sizes
from transom_worker.kvcache.pool import GroupPool
from transom_worker.kvcache.prefix_outcome import OutcomeCounts
from transom_worker.kvcache.prefix_search import PrefixHit, find_hit, hit_limit
from transom_worker.kvcache.publishing import Publishing
from transom_worker.kvcache.retention import Retention
from transom_worker.kvcache.sequence import SequenceBlocks
from transom_worker.kvcache.stats import CacheStats
from transom_worker.kvcache.tree import CheckpointKind, Node


class KvCache:
    """Owns every block of one worker. Not thread-safe.

    `policy` decides what is evicted (learned return times if None), `clock` gives seconds.

    Raises:
        ConfigError: a group's block is neither the hash unit nor one compressed entry, or a page holds none of its blocks.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        *,
        block_size: int,
        enable_prefix_caching: bool = True,
        window_repair: bool = True,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_block_sizes(layout, block_size)
        self.layout = layout
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.window_repair = window_repair
        self.retentions = tuple(Retention(group.spec) for group in layout.groups)
        self.arena = Arena(layout)
        self.pools = [GroupPool(self.arena, group) for group in range(len(layout.groups))]
        self.registry = BlockRegistry(layout, self.pools, block_size=block_size, clock=clock)
        self.index = self.registry.index
        self.num_releases = 0  # grows whenever blocks may have come free
        self.checkpoints = Checkpoints(
            layout,
            self.retentions,
            policy or ReturnTimePolicy(),
            block_size=block_size,
            repair=window_repair,
            present=self.registry.has,
            pin=self.registry.pin,
            unpin=self.registry.unpin,
        )
        self._allocator = BlockAllocator(self.arena, self.pools, self.registry.evict, self.checkpoints.evict_one)
        self._running: dict[int, SequenceBlocks] = {}  # by id()
        self._publishing = Publishing(
            self.registry, self.checkpoints, self.retentions, block_size=block_size, is_on=enable_prefix_caching
        )
        self._compaction = Compaction(self.arena, self.pools, self.registry, self._running)
        self.capacity = Capacity(self.retentions, self.arena, self._allocator)
        self.outcomes = OutcomeCounts(self.index, block_size=block_size)
        self.snapshots = CacheSnapshots(
            self.arena, self.pools, self.registry, self._compaction, self.outcomes, clock=clock
        )

    # Searching

    def find(self, chain: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """The longest reusable prefix of `num_tokens` known tokens; at least one is left to compute."""
        limit = hit_limit(num_tokens, self.block_size)
        return find_hit(self.retentions, self.index.groups, chain, limit, window_repair=self.window_repair)

    # A sequence's life

    def begin(self, chain: list[bytes], root: bytes, *, hit: PrefixHit | None = None) -> SequenceBlocks:
        """Start a sequence on the cached blocks of a hit (None: on nothing).

        Where the hit needs a repair, the sliding groups begin empty at `hit.start`, their sink blocks apart.
        """
        blocks = SequenceBlocks.at(hit, chain, root, self.retentions, unit=self.block_size)
        for group, table in enumerate(blocks.tables):
            found = self.index.groups[group]
            digests = blocks.shared_digests(group, self.retentions[group], unit=self.block_size)
            shared = [found[digest] for digest in digests]
            self.registry.ref(group, shared)
            table.append(shared)
        blocks.base = self.checkpoints.lock(chain, blocks.num_published)
        self._running[id(blocks)] = blocks
        return blocks

    def plan_checkpoints(
        self, blocks: SequenceBlocks, boundaries: Sequence[tuple[int, CheckpointKind]], *, is_new: bool = True
    ) -> None:
        """A sequence is admitted: keep what is live at these boundaries (units, beyond the hit) when `advance` passes them.

        Where chains were seen to part, a checkpoint is added. From a new request the cache learns what clients come back to.
        """
        if blocks.repair_until:
            self.outcomes.count_repair(blocks.repair_until - blocks.repair_from)
        self._publishing.plan(blocks, boundaries, is_new=is_new)

    def plan_fork_checkpoint(self, blocks: SequenceBlocks, units: int) -> None:
        """Another waits for a sequence up to this boundary, which it has not processed, and parts from it there."""
        self._publishing.plan_fork_checkpoint(blocks, units)

    def extend(self, blocks: SequenceBlocks, end: int, *, reserve: int = 0, compact: bool = True) -> bool:
        """Give every group blocks for positions below `end`; False, and nothing changed, if memory is short.

        `reserve` blocks per group must stay within reach besides. Evicts cached blocks as needed, and moves active ones together
        if that is what it takes and `compact` allows.
        """
        needs = [
            max(0, -(-end // retention.block_size) - table.end_block)
            for retention, table in zip(self.retentions, blocks.tables, strict=True)
        ]
        if reserve and self._allocator.pages_needed([need + reserve for need in needs]) is None:
            return False
        pages = self._allocator.pages_needed(needs)
        if pages is None:
            if not compact or not (cleared := self._compaction.pages_to_clear(needs)):
                return False
            self._evict_cached("compaction")
            self._compaction.clear(cleared)
            pages = self._allocator.pages_needed(needs)
            assert pages is not None
        spare = self._allocator.usable_pages - sum(pages)
        for group, table in enumerate(blocks.tables):
            if needs[group]:
                share = pages[group] + spare
                ids, used = self._allocator.allocate(group, needs[group], table.last, share)
                spare = share - used
                table.append(ids)
                self.registry.taken(group, ids)
                blocks.changed = True
        blocks.capacity_tokens = max(blocks.capacity_tokens, -(-end // self.block_size) * self.block_size)
        return True

    def advance(self, blocks: SequenceBlocks, token_ids: Sequence[int], processed: int) -> None:
        """`processed` tokens have their KV: publish filled blocks, free what nothing will read again."""
        blocks.processed = processed
        if processed < blocks.next_event:
            return
        self._publishing.publish(blocks, token_ids, processed)
        self._publishing.place_planned(blocks, processed)
        blocks.next_event = (processed // self.block_size + 1) * self.block_size
        for group, (retention, table) in enumerate(zip(self.retentions, blocks.tables, strict=True)):
            if retention.keeps_everything:
                continue
            fallen = table.drop_until(retention.first_live_block(processed))
            if fallen:
                self.registry.unref(group, fallen)
                self.num_releases += len(fallen)
                blocks.changed = True
            blocks.next_event = min(blocks.next_event, retention.next_change(processed))

    def release(self, blocks: SequenceBlocks, *, kind: CheckpointKind | None = CheckpointKind.GENERATION) -> None:
        """Drop all references; `kind` keeps a checkpoint at the last whole unit processed, None keeps none."""
        self.num_releases += 1
        if kind is not None:
            self._publishing.place_last(blocks, kind)
        for group, table in enumerate(blocks.tables):
            self.registry.unref(group, [*reversed(table.run), *reversed(table.sink_blocks)])
            table.sink_blocks, table.run = [], []
        if blocks.base is not None:
            self.checkpoints.unlock(blocks.base)
            blocks.base = None
        del self._running[id(blocks)]

    # Reports

    def evict_all(self) -> None:
        """Evict every cached block."""
        self._evict_cached("reset")
        self.num_releases += 1

    @property
    def shape(self) -> CacheShape:
        """What a mirror of the index needs to search as `find` does."""
        return CacheShape(
            groups=tuple(retention.spec for retention in self.retentions),
            block_size=self.block_size,
            window_repair=self.window_repair,
            enable_prefix_caching=self.enable_prefix_caching,
        )

    @property
    def index_version(self) -> int:
        """Changes of the index since start."""
        return self.registry.changes.version

    def take_update(self) -> KvUpdate | None:
        """How the index changed since the last call."""
        return self.registry.changes.take()

    def whole_index(self) -> KvUpdate:
        """Everything that can be found now."""
        return self.registry.changes.whole()

    def take_copies(self) -> list[BlockCopy]:
        """Block copies that the next plan must carry."""
        return self._compaction.take_copies()

    def stats(self) -> CacheStats:
        """Pages and blocks by state, evictions and outcomes since start."""
        return CacheStats(
            num_pages=self.arena.num_pages,
            free_pages=self.arena.num_free,
            page_bytes=self.layout.page_bytes,
            groups=self.registry.stats(),
            outcome_tokens=dict(self.outcomes.tokens),
            waste=self.arena.waste,
            outcome_requests=dict(self.outcomes.requests),
            num_repairs=self.outcomes.num_repairs,
            repair_tokens=self.outcomes.repair_tokens,
            checkpoints=self.checkpoints.counts.stats(),
            num_compacted_blocks=self._compaction.num_moved,
        )

    def checkpoints_of(self, group: int, digest: bytes) -> list[tuple[Node, str]]:
        """The checkpoints that count on a block, each with the part of it that does: "chain" or "window"."""
        return self.checkpoints.counting_on(group, digest)

    def cached_age_s(self, group: int, block: int) -> float:
        """How long a cached block has not been referenced."""
        return self.registry.cached_age_s(group, block)

    # Inside

    def _evict_cached(self, reason: str) -> None:
        while self.checkpoints.evict_one():
            pass
        for pool in self.pools:
            self.registry.evict(pool.group, list(pool.evictable), reason)

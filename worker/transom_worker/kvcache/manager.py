"""`KvCache`: manages all KV blocks of one worker: those of running sequences, and the prefix cache.

Terms:

    group        model layers that keep the same tokens for the same time, such as a sliding window (`groups`)
    page         a part of the arena; it is leased to one group at a time and has that group's blocks (`arena`)
    hash block   `--block-size` tokens with a digest; a prompt's chain is the list of its digests (`hashing`)
    hit          the cached prefix that a sequence starts from (`prefix_search`)
    publish      make a computed block findable under its digest
    checkpoint   a boundary of a chain whose blocks the cache keeps, since clients may continue there (`checkpoints`)

The life cycle of a sequence's blocks, as the scheduler drives it:

    hit = cache.find(chain, num_tokens)               the longest reusable prefix
    blocks = cache.begin(chain, root, hit=hit)        reference the cached blocks
    cache.plan_checkpoints(blocks, boundaries)
    each step:  cache.extend(blocks, end)             allocate blocks for the tokens that the step will compute
                cache.advance(blocks, ids, processed) when it has answered: publish full blocks, free those outside of windows
    cache.release(blocks)                             the prefix cache keeps what was published

Blocks are freed by processed tokens, whose step has answered, never by scheduled ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from transom_worker.kvcache.allocator import BlockAllocator
from transom_worker.kvcache.arena import Arena
from transom_worker.kvcache.block_copies import BlockCopy, CopyQueue
from transom_worker.kvcache.block_registry import BlockRegistry
from transom_worker.kvcache.block_table import GappedBlockTable
from transom_worker.kvcache.bounded_retention import BoundedRetention
from transom_worker.kvcache.cache_snapshot import CacheSnapshots
from transom_worker.kvcache.capacity import Capacity
from transom_worker.kvcache.checkpoints import Checkpoints
from transom_worker.kvcache.compaction import Compaction
from transom_worker.kvcache.events import CacheShape, KvUpdate
from transom_worker.kvcache.eviction import EvictionPolicy, ReturnTimePolicy
from transom_worker.kvcache.layout import ArenaLayout, check_block_sizes
from transom_worker.kvcache.pool import GroupPool
from transom_worker.kvcache.prefix_outcome import OutcomeCounts
from transom_worker.kvcache.prefix_search import PrefixHit, find_hit, hit_limit
from transom_worker.kvcache.publishing import Publishing
from transom_worker.kvcache.retention import Retention
from transom_worker.kvcache.retention_set import RetentionSet
from transom_worker.kvcache.sequence import SequenceBlocks
from transom_worker.kvcache.stats import CacheStats
from transom_worker.kvcache.tree import CheckpointKind


class KvCache:
    """All blocks of one worker. Not thread-safe.

    `block_size` is that of a hash block in tokens, `policy` decides what is evicted (`ReturnTimePolicy` if None), `clock` gives
    seconds.

    Raises:
        ConfigError: a group's block is neither a hash block nor one compressed entry, or no block of a group fits in a page.
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
        self.retentions = RetentionSet.of((Retention(group.spec) for group in layout.groups), block_size=block_size)
        self.arena = Arena(layout)
        self.pools = [GroupPool(self.arena, group) for group in range(len(layout.groups))]
        self.registry = BlockRegistry(layout, self.pools, block_size=block_size, clock=clock)
        self.index = self.registry.index
        self.num_releases = 0  # grows whenever blocks may have become free
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
        self.allocator = BlockAllocator(self.arena, self.pools, self.registry.evict, self.checkpoints.evict_one)
        self.running: dict[int, SequenceBlocks] = {}  # by id()
        self._publishing = Publishing(
            self.registry, self.checkpoints, block_size=block_size, is_on=enable_prefix_caching
        )
        self.copies = CopyQueue()
        self.compaction = Compaction(self.arena, self.pools, self.registry, self.running, self.copies)
        self.capacity = Capacity(self.retentions, self.arena, self.allocator)
        self.outcomes = OutcomeCounts(self.index, block_size=block_size)
        self.snapshots = CacheSnapshots(
            self.arena, self.pools, self.registry, self.compaction, self.outcomes, clock=clock
        )

    # Searching

    def find(self, chain: Sequence[bytes], num_tokens: int, retentions: RetentionSet | None = None) -> PrefixHit:
        """Return the longest reusable prefix of `num_tokens` known tokens; at least one token is left to compute.

        `retentions` are those of a sequence with a KV policy.
        """
        limit = hit_limit(num_tokens, self.block_size)
        return find_hit(
            retentions or self.retentions, self.index.groups, chain, limit, window_repair=self.window_repair
        )

    # A sequence from its hit to its release

    def begin(
        self,
        chain: list[bytes],
        root: bytes,
        *,
        hit: PrefixHit | None = None,
        retentions: RetentionSet | None = None,
        keeps_aside: bool = False,
    ) -> SequenceBlocks:
        """Start a sequence on the cached blocks of a hit (None: without any), and reference them.

        `retentions` are those of a sequence with a KV policy; its `chain` must have a root of its own (`hashing.chain_root`).
        With `keeps_aside`, blocks that leave its tables keep their contents until the sequence is released.

        Where the hit needs a window repair (computing cached tokens again for sliding windows), sliding groups get only their
        sink blocks; the sequence computes their other blocks from `hit.start` on.
        """
        retentions = retentions or self.retentions
        blocks = SequenceBlocks.at(hit, chain, root, retentions, block_size=self.block_size)
        blocks.keeps_aside = keeps_aside
        blocks.is_private = any(isinstance(retention, BoundedRetention) for retention in retentions)
        for group, table in enumerate(blocks.tables):
            found = self.index.groups[group]
            digests = blocks.shared_digests(retentions[group], block_size=self.block_size)
            shared = [found[digest] for digest in digests]
            self.registry.ref(group, shared)
            table.append(shared)
        blocks.base_node = self.checkpoints.lock(chain, blocks.num_published)
        self.running[id(blocks)] = blocks
        return blocks

    def plan_checkpoints(
        self, blocks: SequenceBlocks, boundaries: Sequence[tuple[int, CheckpointKind]], *, is_new: bool = True
    ) -> None:
        """Plan checkpoints of an admitted sequence at these boundaries (hash blocks, behind the hit); `advance` places them.

        One more is added where the sequence's chain parts from a cached one. From a new request (`is_new`: not one that was
        preempted) the cache learns what clients return to.
        """
        if blocks.needs_repair:
            self.outcomes.count_repair(blocks.repair_until - blocks.repair_from)
        self._publishing.plan(blocks, boundaries, is_new=is_new)

    def plan_fork_checkpoint(self, blocks: SequenceBlocks, boundary: int) -> None:
        """Plan a checkpoint at a boundary (in hash blocks) ahead, where the chain of a waiting sequence parts from this one's."""
        self._publishing.plan_fork_checkpoint(blocks, boundary)

    def extend(self, blocks: SequenceBlocks, end: int, *, reserve: int = 0, compact: bool = True) -> bool:
        """Allocate blocks of every group for positions below `end`; return False, with nothing changed, if memory is short.

        `reserve` more blocks per group must stay available. Cached blocks are evicted as needed. If free blocks are enough by
        count but lie scattered over pages, active blocks are moved together, provided that `compact` allows it.
        """
        needs = [
            max(0, -(-end // retention.block_size) - table.end_block)
            for retention, table in zip(blocks.retentions, blocks.tables, strict=True)
        ]
        if reserve and self.allocator.pages_needed([need + reserve for need in needs]) is None:
            return False
        pages = self.allocator.pages_needed(needs)
        if pages is None:
            if not compact or not (cleared := self.compaction.pages_to_clear(needs)):
                return False
            self._evict_cached("compaction")
            self.compaction.clear(cleared)
            pages = self.allocator.pages_needed(needs)
            assert pages is not None
        # Each group may take the pages that it needs, and the pages that no group needs: so block ids stay consecutive.
        spare = self.allocator.usable_pages - sum(pages)
        for group, table in enumerate(blocks.tables):
            if needs[group]:
                share = pages[group] + spare
                ids, used = self.allocator.allocate(group, needs[group], table.last, share)
                spare = share - used
                table.append(ids)
                self.registry.taken(group, ids)
                blocks.tables_changed = True
        blocks.capacity_tokens = max(blocks.capacity_tokens, -(-end // self.block_size) * self.block_size)
        return True

    def advance(self, blocks: SequenceBlocks, token_ids: Sequence[int], processed: int) -> None:
        """Note that `processed` tokens have their KV: publish full blocks, place checkpoints, free blocks that no query reads
        again.
        """
        blocks.processed = processed
        if processed < blocks.next_event_at:
            return
        self._publishing.publish(blocks, token_ids, processed)
        self._publishing.place_planned(blocks, processed)
        blocks.next_event_at = (processed // self.block_size + 1) * self.block_size
        for group, (retention, table) in enumerate(zip(blocks.retentions, blocks.tables, strict=True)):
            if retention.keeps_everything:
                continue
            first = table.first_block
            dropped = table.drop_until(retention.first_live_block(processed))
            self._left_table(blocks, group, list(enumerate(dropped, start=first)))
            blocks.next_event_at = min(blocks.next_event_at, retention.next_change(processed))

    def remove(self, blocks: SequenceBlocks, group: int, logicals: Sequence[int]) -> None:
        """Remove blocks that a sequence's KV policy does not keep, by logical index; no step in flight may read them."""
        table = blocks.tables[group]
        assert isinstance(table, GappedBlockTable)
        self._left_table(blocks, group, table.remove(logicals))

    def release(self, blocks: SequenceBlocks, *, kind: CheckpointKind | None = CheckpointKind.GENERATION) -> None:
        """Remove all references of a sequence. `kind` places a checkpoint behind its last whole hash block; None places none."""
        self.num_releases += 1
        if kind is not None:
            self._publishing.place_last(blocks, kind)
        for group, table in enumerate(blocks.tables):
            self.registry.unref(group, table.take_all())
        if blocks.base_node is not None:
            self.checkpoints.unlock(blocks.base_node)
            blocks.base_node = None
        del self.running[id(blocks)]

    # State of the cache

    def evict_all(self) -> None:
        """Evict every cached block."""
        self._evict_cached("reset")
        self.num_releases += 1

    @property
    def shape(self) -> CacheShape:
        """What a router's mirror of the index needs to search as `find` does."""
        return CacheShape(
            groups=tuple(retention.spec for retention in self.retentions),
            block_size=self.block_size,
            window_repair=self.window_repair,
            enable_prefix_caching=self.enable_prefix_caching,
        )

    @property
    def index_version(self) -> int:
        """The number of changes of the prefix index since start."""
        return self.registry.changes.version

    def take_update(self) -> KvUpdate | None:
        """Return the changes of the prefix index since the last call; None if there are none."""
        return self.registry.changes.take()

    def whole_index(self) -> KvUpdate:
        """Return the whole content of the prefix index."""
        return self.registry.changes.whole()

    def take_copies(self) -> list[BlockCopy]:
        """Return the block copies since the last call, in order; the next plan must carry them."""
        return self.copies.take()

    def stats(self) -> CacheStats:
        """Return pages and blocks by state, and evictions and outcomes since start."""
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
            num_compacted_blocks=self.compaction.num_moved,
        )

    def _left_table(self, blocks: SequenceBlocks, group: int, gone: Sequence[tuple[int, int]]) -> None:
        """Free the (logical index, block id) pairs that left a sequence's table, or put them aside."""
        if not gone:
            return
        blocks.tables_changed = True
        if blocks.keeps_aside:
            blocks.tables[group].aside.update(gone)
            return
        self.registry.unref(group, [block for _, block in gone])
        self.num_releases += len(gone)

    def _evict_cached(self, reason: str) -> None:
        """Evict all checkpoints, then all cached blocks that no sequence references."""
        while self.checkpoints.evict_one():
            pass
        for pool in self.pools:
            self.registry.evict(pool.group, list(pool.evictable), reason)

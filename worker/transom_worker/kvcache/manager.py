"""`KvCache`: manages all KV blocks of one worker: those of running sequences, and the prefix cache.

The life cycle of a sequence's blocks, as the scheduler drives it (`kvcache` defines the terms, `sequence_blocks` has the states):

    hit = cache.find(chain, num_tokens)               the longest reusable prefix
    blocks = cache.begin(chain, root, hit=hit)        reference the hit's blocks
    if the state is AWAITS_LOAD:                      some of them are in the host tier
        cache.start_load(blocks)                      allocate blocks on the device, and queue the copies
        cache.finish_load(ticket)                     when the ranks have reported the load
    cache.plan_checkpoints(blocks, boundaries)
    each step:  cache.extend(blocks, end)             allocate blocks for the tokens that the step will compute
                cache.advance(blocks, ids, processed) when its result is there: publish full blocks, free those outside of windows
    cache.release(blocks)                             drop the references; the prefix cache keeps what was published
    or cache.swap_out(blocks)                         move all blocks to the host tier; then `swap_in` begins to load them again,
                                                      or `drop_swapped` gives them up

Blocks slide out of a window according to *processed* tokens, those whose step's result has arrived, never according to scheduled
tokens: a step in flight may still read the blocks. Other callers use the cache's parts: `tiers` (imports, exports, loads),
`changes` (what routers must know), `copies` (what the ranks must copy), `capacity`, `snapshots`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from transom_core.client_queue import NO_CLIENT, Sharer
from transom_core.contract.kv_events import CacheShape
from transom_core.kv_cache.layout import ArenaLayout, check_block_sizes
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.prefix_search import PrefixHit, find_hit, hit_limit, shared_digests
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.retention_set import RetentionSet
from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_worker.kvcache.blocks.allocator import BlockAllocator, Capacity
from transom_worker.kvcache.blocks.block_copies import CopyQueue
from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.blocks.block_table import HOLE, GappedBlockTable, StateTable
from transom_worker.kvcache.blocks.compaction import Compaction
from transom_worker.kvcache.blocks.sequence_blocks import BlocksState, PendingLoad, SequenceBlocks
from transom_worker.kvcache.cache_snapshot import CacheSnapshots
from transom_worker.kvcache.eviction.checkpoints import Checkpoints
from transom_worker.kvcache.eviction.eviction_policy import EvictionPolicy, ReturnTimePolicy
from transom_worker.kvcache.prefix.change_log import ChangeLog
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex
from transom_worker.kvcache.prefix.prefix_outcome import OutcomeCounts
from transom_worker.kvcache.prefix.tree import CheckpointKind, PrefixTree
from transom_worker.kvcache.publishing import Publishing
from transom_worker.kvcache.stats import CacheStats
from transom_worker.kvcache.tiers.disk.index import DiskIndex, DiskStores
from transom_worker.kvcache.tiers.exports import Exports
from transom_worker.kvcache.tiers.host_tier import HostTier
from transom_worker.kvcache.tiers.imports import Imports
from transom_worker.kvcache.tiers.loads import Load, Loads
from transom_worker.kvcache.tiers.tier_moves import TierMoves
from transom_worker.kvcache.tiers.tiers import Tiers


class KvCache:
    """All blocks of one worker. Not thread-safe.

    `host_layout` is the host tier's arena (None: there is no host tier). `block_size` is the size of a hash block in tokens,
    `identity` the model's identity (`CacheShape`); `policy` decides what is evicted (`ReturnTimePolicy` if None), and `clock` gives
    seconds.

    Raises:
        ConfigError: a group's block is neither a hash block nor one compressed entry.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        host_layout: ArenaLayout | None = None,
        *,
        block_size: int,
        identity: str = "",
        enable_prefix_caching: bool = True,
        window_repair: bool = True,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_block_sizes(layout, block_size)
        self.layout = layout
        self.block_size = block_size
        self.identity = identity
        self.enable_prefix_caching = enable_prefix_caching
        self.window_repair = window_repair
        self.clock = clock
        self.retentions = RetentionSet.of((Retention(group.spec) for group in layout.groups), block_size=block_size)
        # The group of recurrent layers, which have all their state in one block; None if the model has none.
        self.state_group = next((index for index, one in enumerate(self.retentions) if one.spec.is_state), None)
        # The device's blocks.
        self.index = PrefixIndex(len(layout.groups))
        self.changes = _change_log(self.index, layout, has_host=host_layout is not None)
        self.registry = BlockRegistry(layout, self.index, self.changes, tier=DEVICE, block_size=block_size, clock=clock)
        self.arena, self.pools = self.registry.arena, self.registry.pools
        block_bytes = [group.block_bytes for group in layout.groups]
        self.copies = CopyQueue(block_bytes, lambda: self.changes.rates)
        # The prefix tree, what is evicted from it, and where that goes.
        host = HostTier(
            host_layout or replace(layout, num_pages=0), self.index, self.changes, block_size=block_size, clock=clock
        )
        tree = PrefixTree(self.retentions, pins=(self.registry, host))
        moves = TierMoves(tree, self.registry, host, self.copies)
        stores = DiskStores(self.index, self.copies, block_bytes=block_bytes)
        self.checkpoints = Checkpoints(
            self.registry, tree, moves, stores, policy or ReturnTimePolicy(block_size), repair=window_repair
        )
        self.eviction = self.checkpoints.eviction
        self.tiers = Tiers(
            host=host,
            moves=moves,
            loads=Loads(self.registry, host, self.copies),
            imports=Imports(
                retentions=self.retentions,
                registry=self.registry,
                host=host,
                copies=self.copies,
                make_room=self.eviction.make_room,
                take_blocks=self._take_for_import,
                lock=self.checkpoints.lock,
                unlock=self.checkpoints.unlock,
            ),
            exports=Exports(self.retentions, self.registry, host, self.copies),
            stores=stores,
            disk=DiskIndex(len(layout.groups)),
        )
        # Sequences.
        self.allocator = BlockAllocator(self.registry, self.eviction.evict_one)
        self.running: dict[int, SequenceBlocks] = {}  # by id(): those with blocks on the device
        self.publishing = Publishing(
            registry=self.registry,
            checkpoints=self.checkpoints,
            host=host,
            is_on=enable_prefix_caching,
            state_group=self.state_group,
        )
        self.compaction = Compaction(self.registry, self.running, self.copies, self.tiers.fixed_blocks)
        self._num_releases = 0
        # What others ask.
        self.capacity = Capacity(self.retentions, self.arena, self.allocator)
        self.outcomes = OutcomeCounts(self.index, block_size=block_size, keeps_states=self.state_group is not None)
        self.snapshots = CacheSnapshots(self.registry, self.compaction, self.outcomes, self.tiers, clock=clock)

    # Searching

    def find(
        self,
        chain: Sequence[bytes],
        num_tokens: int,
        retentions: RetentionSet | None = None,
        *,
        with_disk: bool = False,
    ) -> PrefixHit:
        """Return the longest reusable prefix of `num_tokens` known tokens; at least one token is left to compute.

        `retentions` say which blocks the sequence needs; None: those of sequences without a KV policy. With `with_disk`, the hit
        may include blocks of the disk tier, for which `tiers.imports` allocates host blocks.
        """
        return find_hit(
            retentions or self.retentions,
            self.index.groups,
            chain,
            hit_limit(num_tokens, self.block_size),
            window_repair=self.window_repair,
            host=self.tiers.host.blocks,
            disk=self.tiers.disk.groups if with_disk else None,
            rates=self.changes.rates,
        )

    def load_to_share(
        self, chain: Sequence[bytes], hit: PrefixHit, retentions: RetentionSet | None = None
    ) -> tuple[Load, list[int]] | None:
        """Return the running load that brings the most of the blocks that a hit would load, and how many of each group; None if no
        load brings any of them.

        `retentions` are as in `find`.
        """
        if not hit.num_loaded or not self.tiers.loads.by_ticket:
            return None
        lacking = [
            set(shared_digests(retention, chain, hit, block_size=self.block_size)).difference(on_device)
            for retention, on_device in zip(retentions or self.retentions, self.index.groups, strict=True)
        ]
        return self.tiers.loads.bringing_most(lacking)

    # A sequence from its hit to its release

    def begin(
        self,
        chain: list[bytes],
        root: bytes,
        *,
        hit: PrefixHit | None = None,
        retentions: RetentionSet | None = None,
        keeps_aside: bool = False,
        sharer: Sharer = NO_CLIENT,
    ) -> SequenceBlocks:
        """Start a sequence on the cached blocks of a hit, and reference them; `hit` is None for a sequence without cached blocks.

        `retentions` are as in `find`; with a KV policy, the chain must have the policy's own root (`hashing.chain_root`). With
        `keeps_aside`, blocks that leave its tables keep their contents until the sequence is released. Its loads take turns with
        those of other clients as its `sharer`'s.

        If the hit needs a window repair, sliding groups get only their sink blocks; the sequence computes their other blocks from
        `hit.start` on. If the hit has blocks in the host tier, the sequence's state is AWAITS_LOAD.
        """
        retentions = retentions or self.retentions
        blocks = SequenceBlocks.at(
            hit, chain, root, retentions, block_size=self.block_size, keeps_aside=keeps_aside, sharer=sharer
        )
        to_load: list[list[int]] = []
        for group, table in enumerate(blocks.tables):
            found, in_host = self.index.groups[group], self.tiers.host.blocks[group]
            digests = blocks.shared_digests(retentions[group], block_size=self.block_size)
            shared = [found.get(digest, HOLE) for digest in digests]
            self.registry.ref(group, [block for block in shared if block != HOLE])
            table.append(shared)
            if hit is not None and hit.num_loaded:
                to_load.append([in_host[digest] for digest in digests if digest not in found])
                self.tiers.host.need(group, to_load[group])
        if to_load:
            blocks.move_to(BlocksState.AWAITS_LOAD, PendingLoad(to_load))
        blocks.base_node = self.checkpoints.lock(chain, blocks.num_published)
        self.running[id(blocks)] = blocks
        return blocks

    def start_load(self, blocks: SequenceBlocks, *, reserve: int = 0, compact: bool = True) -> bool:
        """Allocate blocks on the device for what a sequence has in the host tier, and queue the copies; return False, with
        nothing changed, if memory is short. Arguments are as in `extend`.

        The sequence must not compute, nor be released, before `finish_load` has its ticket, `blocks.load.ticket`.
        """
        needs = [len(of_group) for of_group in blocks.load.host_blocks]
        targets = self._allocate(needs, [None] * len(needs), reserve=reserve, compact=compact)
        if targets is None:
            return False
        self.tiers.loads.start(blocks, targets)
        return True

    def finish_load(self, ticket: int) -> Load | None:
        """Note that the ranks have made a load, so that searches find its blocks on the device; return the load, or None for an
        unknown ticket."""
        load = self.tiers.loads.finish(ticket)
        if load is not None and load.blocks.base_node is not None:
            self.checkpoints.promote(load.blocks.base_node)
        return load

    def plan_checkpoints(
        self, blocks: SequenceBlocks, boundaries: Sequence[tuple[int, CheckpointKind]], *, is_new: bool = True
    ) -> None:
        """Plan checkpoints of an admitted sequence at these boundaries (hash blocks, after the hit); `advance` places them.

        One more is planned where the sequence's chain parts from a cached one. If the request `is_new` (not admitted again after a
        preemption), the cache also learns what clients return to.
        """
        if blocks.repair.is_needed:
            self.outcomes.count_repair(blocks.repair.end - blocks.repair.start)
        self.publishing.plan(blocks, boundaries, is_new=is_new)

    def extend(self, blocks: SequenceBlocks, end: int, *, reserve: int = 0, compact: bool = True) -> bool:
        """Allocate blocks of every group for positions below `end`; return False, with nothing changed, if memory is short.

        `reserve` more blocks per group, except of states, must stay available. Cached blocks are evicted as needed. If there are
        enough blocks but they are scattered over pages of other groups, `compact` allows moving active blocks together.

        If the next row ends at a boundary whose state should be kept (`_keeps_state`), a state group gets one more block, which
        rows after the boundary write, as long as that takes no block from other sequences.
        """
        needs = [
            table.num_missing(end, retention.block_size)
            for retention, table in zip(blocks.retentions, blocks.tables, strict=True)
        ]
        near = [table.last for table in blocks.tables]
        taken = None
        if keeps_state := self._keeps_state(blocks, end):
            more = [need + retention.spec.is_state for need, retention in zip(needs, blocks.retentions, strict=True)]
            taken = self._allocate(more, near, reserve=max(reserve, len(self.running)), compact=False)
            keeps_state = taken is not None
        if taken is None:
            taken = self._allocate(needs, near, reserve=reserve, compact=compact)
        if taken is None:
            return False
        for group, (table, ids) in enumerate(zip(blocks.tables, taken, strict=True)):
            if ids:
                table.append(ids)
                blocks.tables_changed = True
            if keeps_state and isinstance(table, StateTable):
                table.keep(end)
                self.registry.touch(group, table.run)  # the block map shows what they stand for
        blocks.capacity_tokens = max(blocks.capacity_tokens, self._capacity(end))
        return True

    def advance(self, blocks: SequenceBlocks, token_ids: Sequence[int], processed: int) -> None:
        """Note that the KV of `processed` tokens is computed: publish full blocks, place checkpoints, and free blocks that no query
        will read again."""
        blocks.processed = processed
        if processed < blocks.next_event_at:
            return
        self.publishing.publish(blocks, token_ids, processed)
        self.publishing.place_planned(blocks, processed)
        blocks.next_event_at = (processed // self.block_size + 1) * self.block_size
        for group, (retention, table) in enumerate(zip(blocks.retentions, blocks.tables, strict=True)):
            if retention.keeps_everything:
                continue
            self._left_table(blocks, group, table.drop_until(retention.first_live_block(processed)))
            blocks.next_event_at = min(blocks.next_event_at, retention.next_change(processed))

    def remove(self, blocks: SequenceBlocks, group: int, logicals: Sequence[int]) -> None:
        """Remove blocks that a sequence's KV policy does not keep, by logical index; no step in flight may read them."""
        table = blocks.tables[group]
        assert isinstance(table, GappedBlockTable)
        self._left_table(blocks, group, table.remove(logicals))

    def release(self, blocks: SequenceBlocks, *, kind: CheckpointKind | None = CheckpointKind.GENERATION) -> None:
        """Remove all references of a sequence. `kind` places a checkpoint after its last whole hash block; None places none."""
        if kind is not None:
            self.publishing.place_last(blocks, kind)
        self.tiers.loads.release(blocks)
        blocks.move_to(BlocksState.RELEASED)
        self._leave_device(blocks)

    def swap_out(self, blocks: SequenceBlocks) -> bool:
        """Move a sequence's live blocks to the host tier, and release its blocks on the device.

        Return False, with nothing changed, if there is no room, or if the sequence has no live block (a load without copies would
        never be reported). The host's copies belong to the sequence and are not in the index, so nothing evicts them. No step in
        flight may compute the sequence. `swap_in` or `drop_swapped` must follow.
        """
        live = blocks.live_blocks()
        counts = [len(of_group) for of_group in live]
        if not any(counts) or not self.eviction.make_room(lambda: counts):
            return False
        saved = self.tiers.host.take(counts)
        for group, (sources, targets) in enumerate(zip(live, saved, strict=True)):
            self.tiers.host.num_swapped_out[group] += len(sources)
            for source, target in zip(sources, targets, strict=True):
                self.copies.add(group, source, target, source_tier=DEVICE, target_tier=HOST)
        tables = blocks.tables_with_holes()
        self._leave_device(blocks)
        blocks.move_to(BlocksState.SWAPPED, PendingLoad(saved))
        blocks.tables, blocks.was_swapped = tables, True
        blocks.capacity_tokens = self._capacity(blocks.processed)
        return True

    def swap_in(self, blocks: SequenceBlocks, *, reserve: int = 0, compact: bool = True) -> bool:
        """Begin to load a swapped sequence; return False, with nothing changed, if memory is short. See `start_load`."""
        if not self.start_load(blocks, reserve=reserve, compact=compact):
            return False
        self.running[id(blocks)] = blocks
        blocks.tables_changed = True
        return True

    def drop_swapped(self, blocks: SequenceBlocks) -> None:
        """Release the host's blocks of a swapped sequence."""
        self.tiers.loads.release(blocks)
        blocks.move_to(BlocksState.RELEASED)

    # State of the cache

    @property
    def num_releases(self) -> int:
        """A number that grows whenever blocks may have become free. If it has grown, what did not fit before may be tried again."""
        return self._num_releases + self.tiers.exports.num_left_device + self.tiers.imports.num_left_device

    def evict_all(self) -> None:
        """Evict every cached block of both tiers, and withdraw active blocks from the index. Blocks that running loads bring are
        not published."""
        self.eviction.drop_all()
        self.evict_unpinned("reset")
        for pool in self.pools:
            self.registry.withdraw(pool.group, list(pool.published))
        self.tiers.lose_contents()
        self._num_releases += 1

    def evict_unpinned(self, reason: str) -> None:
        """Evict all cached blocks on the device that no node pins and no sequence references; `reason` is counted."""
        for pool in self.pools:
            self.registry.evict(pool.group, list(pool.evictable), reason)

    @property
    def shape(self) -> CacheShape:
        """What a router's mirror of the index needs, to search it as `find` does."""
        return CacheShape(
            groups=tuple(retention.spec for retention in self.retentions),
            block_size=self.block_size,
            window_repair=self.window_repair,
            enable_prefix_caching=self.enable_prefix_caching,
            has_host_tier=self.tiers.host.exists,
            has_disk_tier=self.tiers.disk.is_open,
            identity=self.identity,
        )

    def stats(self) -> CacheStats:
        """Return pages and blocks by state, and evictions and outcomes since start."""
        host = self.tiers.host
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
            checkpoints=self.checkpoints.counts.copy(),
            num_compacted_blocks=self.compaction.num_moved,
            host_pages=host.arena.num_pages,
            host_free_pages=host.arena.num_free,
            host_groups=self.tiers.host_stats([group.spec.name for group in self.layout.groups]),
            host_tokens=self.outcomes.host_tokens,
        )

    def _capacity(self, end: int) -> int:
        """Return the positions below which rows need not `extend` a sequence that was extended to `end`.

        These are the positions of its last block; but with recurrent layers a row that ends at a boundary must, since its state may
        be kept there.
        """
        boundary = -(-end // self.block_size) * self.block_size
        return boundary if self.state_group is None or end == boundary else boundary - 1

    def _keeps_state(self, blocks: SequenceBlocks, end: int) -> bool:
        """Return whether a sequence's state after `end` tokens should be kept, if there is room.

        It is kept where a checkpoint is planned. It is also kept at other boundaries if that evicts no checkpoint and the sequence
        holds no other snapshot: there the sequence continues after a preemption, and what follows its answer after its end.
        """
        boundary = end // self.block_size
        group = self.state_group
        if group is None or end % self.block_size or not self.publishing.publishes(blocks):
            return False
        if len(blocks.chain) >= boundary and self.registry.has(group, blocks.chain[boundary - 1]):
            return False
        is_planned = any(at == boundary for at, _ in blocks.planned_checkpoints)
        return is_planned or (len(blocks.tables[group].run) < 2 and self.allocator.has_unpinned(group))

    def _leave_device(self, blocks: SequenceBlocks) -> None:
        """Remove a sequence's references and its lock, and empty its tables."""
        self._num_releases += 1
        for group, table in enumerate(blocks.tables):
            self.registry.unref(group, table.take_all())
        if blocks.base_node is not None:
            self.checkpoints.unlock(blocks.base_node)
            blocks.base_node = None
        del self.running[id(blocks)]

    def _left_table(self, blocks: SequenceBlocks, group: int, gone: Sequence[tuple[int, int]]) -> None:
        """Free the (logical index, block id) pairs that left a sequence's table, or put them aside."""
        if not gone:
            return
        blocks.tables_changed = True
        blocks.num_dropped += len(gone)
        if blocks.keeps_aside:
            blocks.tables[group].aside.update(gone)
            return
        self.registry.unref(group, [block for _, block in gone])
        self._num_releases += len(gone)

    def _take_for_import(self, needs: Sequence[int]) -> list[list[int]] | None:
        """Take blocks on the device, and leave one more for each running sequence in each group; None if they do not fit, or if the
        blocks of all imports that wait for their bytes would fill more than half of the pool."""
        coming = [need + self.tiers.imports.num_coming(group) for group, need in enumerate(needs)]
        num_pages = sum(-(-count // size) for count, size in zip(coming, self.arena.blocks_per_page, strict=True))
        if 2 * num_pages > self.arena.num_pages:
            return None
        return self._taken(list(needs), [None] * len(needs), reserve=len(self.running), compact=False)

    def _allocate(
        self, needs: list[int], near: Sequence[int | None], *, reserve: int, compact: bool
    ) -> list[list[int]] | None:
        """Return `needs[group]` blocks of each group on the device, if possible after block `near[group]`; None if memory is short
        (`extend`)."""
        taken = self._taken(needs, near, reserve=reserve, compact=compact)
        if taken is None and self.tiers.imports.leave_device():
            taken = self._taken(needs, near, reserve=reserve, compact=compact)
        return taken

    def _taken(
        self, needs: list[int], near: Sequence[int | None], *, reserve: int, compact: bool
    ) -> list[list[int]] | None:
        """Do what `_allocate` does, without blocks that imports hold."""
        if reserve:  # what fits with the reserve fits without it, too
            # running sequences need no more of these
            is_state = [retention.spec.is_state for retention in self.retentions]
            needed = [need if state else need + reserve for need, state in zip(needs, is_state, strict=True)]
            if self.allocator.pages_needed(needed) is None:
                return None
        taken = self.allocator.allocate_all(needs, near)
        if taken is None:
            if not compact or not (cleared := self.compaction.pages_to_clear(needs)):
                return None
            # `clear` moves active blocks only, so nothing may stay cached in the pages that it clears.
            while self.eviction.evict_one():
                pass
            self.evict_unpinned("compaction")
            self.compaction.clear(cleared)
            taken = self.allocator.allocate_all(needs, near)
            assert taken is not None
        for group, ids in enumerate(taken):
            if ids:
                self.registry.touch(group, ids)
        return taken


def _change_log(index: PrefixIndex, layout: ArenaLayout, *, has_host: bool) -> ChangeLog:
    """Return the log of an index. Without a host tier, the log has only the device's tier and no load rates."""
    if not has_host:
        return ChangeLog((index.groups,))
    return ChangeLog(index.tiers, LoadRates.unmeasured([group.stride_bytes for group in layout.groups]))

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from transom_core.contract.kv_events import CacheShape, KvUpdate
from transom_core.kv_cache.layout import ArenaLayout, check_block_sizes
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.prefix_search import PrefixHit, find_hit, hit_limit, shared_digests
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.retention_set import RetentionSet
from transom_core.kv_cache.tiers import DEVICE, DISK, HOST
from transom_worker.kvcache.blocks.allocator import BlockAllocator
from transom_worker.kvcache.blocks.arena import Arena
from transom_worker.kvcache.blocks.block_copies import BlockCopy, CopyQueue
from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.blocks.block_table import HOLE, GappedBlockTable
from transom_worker.kvcache.blocks.capacity import Capacity
from transom_worker.kvcache.blocks.compaction import Compaction
from transom_worker.kvcache.blocks.pool import GroupPool
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.kvcache.bounded_retention import BoundedRetention
from transom_worker.kvcache.cache_snapshot import CacheSnapshots
from transom_worker.kvcache.eviction.checkpoints import Checkpoints
from transom_worker.kvcache.eviction.eviction_policy import EvictionPolicy, ReturnTimePolicy
from transom_worker.kvcache.host_snapshot import HostSnapshots
from transom_worker.kvcache.imports import BlockImport, Imports
from transom_worker.kvcache.prefix.change_log import ChangeLog
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex
from transom_worker.kvcache.prefix.prefix_outcome import OutcomeCounts
from transom_worker.kvcache.prefix.tree import CheckpointKind
from transom_worker.kvcache.publishing import Publishing
from transom_worker.kvcache.stats import CacheStats, HostGroupStats
from transom_worker.kvcache.tiers.disk_index import DiskIndex
from transom_worker.kvcache.tiers.disk_stores import DiskStores
from transom_worker.kvcache.tiers.exports import BlockExport, Exports
from transom_worker.kvcache.tiers.host_tier import HostTier
from transom_worker.kvcache.tiers.loads import Load, Loads
from transom_worker.kvcache.tiers.swapping import Swapping, tables_with_holes
from transom_worker.kvcache.tiers.tier_moves import TierMoves


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
        host_layout: ArenaLayout | None = None,
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
        strides = [group.stride_bytes for group in layout.groups]
        self.index = PrefixIndex(len(layout.groups), num_tiers=1 if host_layout is None else 2)
        self.changes = ChangeLog(self.index.tiers, None if host_layout is None else LoadRates.unmeasured(strides))
        self.registry = BlockRegistry(
            layout, self.pools, self.index, self.changes, tier=DEVICE, block_size=block_size, clock=clock
        )
        self.copies = CopyQueue()
        self.host: HostTier | None = None
        if host_layout is not None:
            self.host = HostTier(host_layout, self.index, self.changes, block_size=block_size, clock=clock)
        self.disk: DiskIndex | None = None  # None: nothing is read from a disk tier
        self.num_releases = 0  # grows whenever blocks may have become free
        self.checkpoints = Checkpoints(
            layout,
            self.retentions,
            policy or ReturnTimePolicy(block_size),
            block_size=block_size,
            repair=window_repair,
            present=self.registry.has,
            pin=self._pin,
            unpin=self._unpin,
        )
        self.eviction = self.checkpoints.eviction
        self.loads: Loads | None = None
        self.imports: Imports | None = None
        self.swapping: Swapping | None = None
        if self.host is not None:
            self.eviction.moves = TierMoves(
                self.checkpoints.tree, self.index, self.registry, self.pools, self.host, self.copies, layout=layout
            )
            self.loads = Loads(self.registry, self.host, self.copies)
            self.imports = Imports(self.retentions, self.index, self.host, self.checkpoints, block_size=block_size)
            self.swapping = Swapping(self.host, self.copies, self.eviction.make_room)
        self.allocator = BlockAllocator(self.arena, self.pools, self.registry.evict, self.eviction.evict_one)
        self.running: dict[int, SequenceBlocks] = {}  # by id()
        self._publishing = Publishing(
            self.registry, self.checkpoints, host=self.host, block_size=block_size, is_on=enable_prefix_caching
        )
        self.compaction = Compaction(
            self.arena, self.pools, self.registry, self.running, self.copies, self._fixed_blocks
        )
        self.exports = Exports(
            self.retentions, self.index, self.registry, self.host, self.copies, block_size=block_size
        )
        self.capacity = Capacity(self.retentions, self.arena, self.allocator)
        self.outcomes = OutcomeCounts(self.index, block_size=block_size)
        self.snapshots = CacheSnapshots(
            self.arena, self.pools, self.registry, self.compaction, self.outcomes, self._host_snapshots(), clock=clock
        )

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

        `retentions` are those of a sequence with a KV policy. `with_disk`, the hit may need blocks from the disk tier, which
        `import_blocks` takes host blocks for.
        """
        return find_hit(
            retentions or self.retentions,
            self.index.groups,
            chain,
            hit_limit(num_tokens, self.block_size),
            window_repair=self.window_repair,
            host=self.host.blocks if self.host is not None else None,
            disk=self.disk.groups if with_disk and self.disk is not None else None,
            rates=self.changes.rates,
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
        sink blocks; the sequence computes their other blocks from `hit.start` on. Where it has blocks in the host tier, the
        sequence needs those, and `start_load` must follow before it computes.
        """
        retentions = retentions or self.retentions
        blocks = SequenceBlocks.at(hit, chain, root, retentions, block_size=self.block_size, keeps_aside=keeps_aside)
        blocks.is_private = any(isinstance(retention, BoundedRetention) for retention in retentions)
        for group, table in enumerate(blocks.tables):
            found = self.index.groups[group]
            digests = blocks.shared_digests(retentions[group], block_size=self.block_size)
            shared = [found.get(digest, HOLE) for digest in digests]
            self.registry.ref(group, [block for block in shared if block != HOLE])
            table.append(shared)
            if hit is not None and hit.num_loaded:
                assert self.host is not None
                in_host = self.host.blocks[group]
                blocks.to_load.append([in_host[digest] for digest in digests if digest not in found])
                self.host.need(group, blocks.to_load[group])
        blocks.base_node = self.checkpoints.lock(chain, blocks.num_published)
        self.running[id(blocks)] = blocks
        return blocks

    def start_load(self, blocks: SequenceBlocks, *, reserve: int = 0, compact: bool = True) -> bool:
        """Allocate blocks on the device for what a sequence has in the host tier, and queue the copies; return False, with
        nothing changed, if memory is short. Arguments are as in `extend`.

        The sequence must not compute, nor be released, before `finish_load` has its ticket, `blocks.load_ticket`.
        """
        assert self.loads is not None
        needs = [len(of_group) for of_group in blocks.to_load]
        targets = self._allocate(needs, [None] * len(needs), reserve=reserve, compact=compact)
        if targets is None:
            return False
        self.loads.start(blocks, targets)
        return True

    def finish_load(self, ticket: int) -> Load | None:
        """Note that the ranks have done a load: its blocks are found on the device now. Returns the load; None for a ticket that is
        not known any more.
        """
        load = self.loads.finish(ticket) if self.loads is not None else None
        if load is not None and load.blocks.base_node is not None:
            self.checkpoints.promote(load.blocks.base_node)
        return load

    def load_to_share(
        self, chain: Sequence[bytes], hit: PrefixHit, retentions: RetentionSet | None = None
    ) -> tuple[Load, list[int]] | None:
        """Return the load under way that brings most of what a hit would load, and how many blocks of each group; None: none does.

        `retentions` are as in `find`.
        """
        if self.loads is None or not hit.num_loaded or not any(self.loads.by_digest):
            return None
        lacking = [
            [
                digest
                for digest in shared_digests(retention, chain, hit, block_size=self.block_size)
                if digest not in on_device
            ]
            for retention, on_device in zip(retentions or self.retentions, self.index.groups, strict=True)
        ]
        return self.loads.bringing_most(lacking)

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
        near = [table.last for table in blocks.tables]
        taken = self._allocate(needs, near, reserve=reserve, compact=compact)
        if taken is None:
            return False
        for table, ids in zip(blocks.tables, taken, strict=True):
            if ids:
                table.append(ids)
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
            self._left_table(blocks, group, table.drop_until(retention.first_live_block(processed)))
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
        if blocks.to_load:
            assert self.loads is not None
            assert not blocks.load_ticket
            self.loads.release(blocks)
        for group, table in enumerate(blocks.tables):
            self.registry.unref(group, table.take_all())
        if blocks.base_node is not None:
            self.checkpoints.unlock(blocks.base_node)
            blocks.base_node = None
        del self.running[id(blocks)]

    def can_swap(self, blocks: SequenceBlocks) -> bool:
        """Return whether a sequence could be swapped, if there is room: not in a window repair, whose blocks are inexact."""
        return self.swapping is not None and not (blocks.is_repairing or blocks.lost_contents)

    def swap_out(self, blocks: SequenceBlocks) -> bool:
        """Move a sequence's live blocks to the host tier and release it; return False, with nothing changed, if there is no room.

        No step in flight may compute it. Then `swap_in` must follow, or `drop_swapped`.
        """
        assert self.swapping is not None
        saved = self.swapping.save(blocks)
        if saved is None:
            return False
        tables = tables_with_holes(blocks)
        self.release(blocks, kind=None)
        blocks.tables, blocks.to_load, blocks.was_swapped = tables, saved, True
        blocks.capacity_tokens = -(-blocks.processed // self.block_size) * self.block_size
        return True

    def swap_in(self, blocks: SequenceBlocks, *, reserve: int = 0, compact: bool = True) -> bool:
        """Begin to load a swapped sequence; return False, with nothing changed, if memory is short. See `start_load`."""
        self.running[id(blocks)] = blocks
        if not self.start_load(blocks, reserve=reserve, compact=compact):
            del self.running[id(blocks)]
            return False
        blocks.tables_changed = True
        return True

    # What comes from elsewhere, and goes there

    def store_on_disk(self) -> None:
        """From now on copy the blocks of nodes that leave the memory to the disk tier. What `disk` names can be found from then on,
        provided that there is a host tier, through which everything from the disk comes.
        """
        self.eviction.stores = DiskStores(self.checkpoints.tree, self.index, self.copies)
        if self.changes.rates is not None:
            self.disk = DiskIndex(len(self.pools), self.changes)
            strides = [group.stride_bytes for group in self.layout.groups]
            self.changes.set_rates(self.changes.rates.with_unmeasured_reads(strides))

    def store_best_first(self, *, piece_bytes: int) -> Iterator[None]:
        """Queue copies of all nodes to the disk tier, most valuable ones first, and yield whenever about `piece_bytes` are queued,
        which the caller must take.
        """
        num_queued, stored = len(self.copies.waiting), 0
        for node in self.eviction.best_first():
            assert self.eviction.stores is not None
            self.eviction.stores.store(node, with_segment=True)
            stored += sum(self.layout.groups[copy.group].block_bytes for copy in self.copies.waiting[num_queued:])
            num_queued = len(self.copies.waiting)
            if stored >= piece_bytes:
                yield
                num_queued, stored = len(self.copies.waiting), 0
        if num_queued:
            yield

    def import_blocks(
        self, chain: Sequence[bytes], hit: PrefixHit, retentions: RetentionSet | None = None
    ) -> BlockImport | None:
        """Take blocks of the host tier for what a hit that was found elsewhere, on the disk or at another worker, lacks here.
        `retentions` are as in `find`.

        None without a host tier, if nothing is missing, or if there is no room. Their contents must be written behind the copies
        that are queued now; then `commit_import` or `end_import` follows.
        """
        return None if self.imports is None else self.imports.begin(chain, hit, retentions)

    def fetch_import(self, opened: BlockImport) -> int:
        """Queue a load of an import's blocks from the disk, and return its ticket."""
        copies = [BlockCopy(one.group, 0, one.block, DISK, HOST, digest=one.digest) for one in opened.blocks]
        opened.ticket = self.copies.add_load(copies)
        return opened.ticket

    @property
    def is_fetching(self) -> bool:
        """Whether an import waits for a load from the disk, which the ranks must be told of and asked for."""
        return self.imports is not None and any(opened.is_fetching for opened in self.imports.opened)

    def commit_import(self, opened: BlockImport) -> None:
        """Publish the blocks of an import, whose contents are written; they stay until `end_import`."""
        assert self.imports is not None
        self.imports.publish(opened)

    def end_import(self, opened: BlockImport) -> None:
        """End an import: published blocks can be evicted from now on, others are free."""
        assert self.imports is not None
        self.imports.end(opened)

    def export_blocks(
        self, chain: Sequence[bytes], hit: PrefixHit, retentions: RetentionSet | None = None
    ) -> BlockExport | None:
        """Reference the blocks that a hit gives, so that another worker can read them; `end_export` must follow. `retentions` are
        as in `find`.

        None if some of them are still to be written by copies that no plan carries yet.
        """
        return self.exports.begin(chain, hit, retentions)

    def end_export(self, opened: BlockExport) -> None:
        """Give the references of an export back."""
        self.exports.end(opened)
        self.num_releases += 1

    @property
    def is_read_by_others(self) -> bool:
        """Whether exports hold blocks on the device, which no preemption frees."""
        return any(True for _ in self.exports.on_device())

    @property
    def unfinished_loads(self) -> Iterable[Load]:
        """The loads that the ranks have not reported."""
        return self.loads.by_ticket.values() if self.loads is not None else ()

    def num_loading(self, ticket: int) -> list[int]:
        """Return how many blocks of each group a load brings; zeros for a ticket that is not known."""
        load = self.loads.by_ticket.get(ticket) if self.loads is not None else None
        counts = Counter(copy.group for copy in load.copies) if load is not None else Counter[int]()
        return [counts[group] for group in range(len(self.pools))]

    def send_loads_again(self, tickets: Iterable[int]) -> None:
        """Queue the copies of these loads again, under new tickets: it is unknown whether the ranks got them."""
        if self.loads is not None:
            self.loads.send_again(tickets)

    def abandon_loads(self) -> None:
        """Forget all loads, since the ranks were restarted."""
        if self.loads is not None:
            self.loads.abandon()

    def drop_swapped(self, blocks: SequenceBlocks) -> None:
        """Release the host's blocks of a swapped sequence."""
        assert self.loads is not None
        self.loads.release(blocks)

    # State of the cache

    def evict_all(self) -> None:
        """Evict every cached block of both tiers, and let none that is in use be found any more. What loads bring is not
        published.
        """
        self.eviction.drop_all()
        self._evict_unpinned("reset")
        for pool in self.pools:
            self.registry.withdraw(pool.group, list(pool.published))
        self.exports.make_void()
        if self.host is not None and self.loads is not None:
            self.loads.make_void()
            if self.imports is not None:
                self.imports.make_void()
            self.host.empty("reset")
        self.num_releases += 1

    @property
    def shape(self) -> CacheShape:
        """What a router's mirror of the index needs to search as `find` does."""
        return CacheShape(
            groups=tuple(retention.spec for retention in self.retentions),
            block_size=self.block_size,
            window_repair=self.window_repair,
            enable_prefix_caching=self.enable_prefix_caching,
            has_host_tier=self.host is not None,
            has_disk_tier=self.disk is not None,
        )

    @property
    def index_version(self) -> int:
        """The number of changes of the prefix index since start."""
        return self.changes.version

    def take_update(self) -> KvUpdate | None:
        """Return the changes of the prefix index since the last call; None if there are none."""
        return self.changes.take()

    def whole_index(self) -> KvUpdate:
        """Return the whole content of the prefix index."""
        return self.changes.whole()

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
            host_pages=0 if self.host is None else self.host.arena.num_pages,
            host_free_pages=0 if self.host is None else self.host.arena.num_free,
            host_groups=tuple(self._host_stats(group) for group in range(len(self.pools))),
            host_tokens=self.outcomes.host_tokens,
        )

    def _host_snapshots(self) -> HostSnapshots | None:
        """Return what takes snapshots of the host tier; None without one."""
        moves = self.eviction.moves
        if self.host is None or moves is None or self.loads is None or self.swapping is None or self.imports is None:
            return None
        return HostSnapshots(self.host, moves, self.loads, self.swapping, self.imports, self.exports)

    def _host_stats(self, group: int) -> HostGroupStats:
        """Return what a group has in the host tier, and what has moved."""
        name = self.layout.groups[group].spec.name
        if self.host is None or self.loads is None or self.swapping is None or self.eviction.moves is None:
            return HostGroupStats(name=name)
        pool = self.host.pools[group]
        num_cached = len(pool.published)
        return HostGroupStats(
            name=name,
            cached_blocks=num_cached,
            other_blocks=pool.num_active + len(pool.evictable) - num_cached,
            free_blocks=pool.num_free,
            spilled_blocks=self.eviction.moves.num_spilled[group],
            loaded_blocks=self.loads.num_loaded[group],
            swapped_blocks=self.swapping.num_swapped_out[group],
            evicted_blocks=self.host.registry.num_evicted()[group],
            held_blocks=0 if self.imports is None else self.imports.num_held(group),
            imported_blocks=0 if self.imports is None else self.imports.num_imported[group],
        )

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
        self.num_releases += len(gone)

    def _allocate(
        self, needs: list[int], near: Sequence[int | None], *, reserve: int, compact: bool
    ) -> list[list[int]] | None:
        """Return so many blocks of each group on the device, if possible behind `near`; None if memory is short (`extend`)."""
        if reserve and self.allocator.pages_needed([need + reserve for need in needs]) is None:
            return None
        if self.allocator.pages_needed(needs) is None:
            if not compact or not (cleared := self.compaction.pages_to_clear(needs)):
                return None
            while self.eviction.evict_one():
                pass
            self._evict_unpinned("compaction")
            self.compaction.clear(cleared)
        taken = self.allocator.allocate_all(needs, near)
        for group, ids in enumerate(taken):
            if ids:
                self.registry.taken(group, ids)
        return taken

    def _fixed_blocks(self) -> Iterable[tuple[int, int]]:
        """Yield (group, block) of the device's blocks that compaction must not move."""
        yield from self.exports.on_device()
        if self.loads is not None:
            yield from self.loads.targets()

    def _pin(self, tier: int, group: int, digests: Iterable[bytes]) -> None:
        """Pin a tier's blocks under these digests for a node of the prefix tree."""
        if tier == DEVICE:
            self.registry.pin(group, digests)
        else:
            assert self.host is not None
            self.host.need(group, map(self.host.blocks[group].__getitem__, digests))

    def _unpin(self, tier: int, group: int, digests: Iterable[bytes]) -> None:
        """Remove a node's pins from a tier's blocks under these digests."""
        if tier == DEVICE:
            self.registry.unpin(group, digests)
        else:
            assert self.host is not None
            self.host.release(group, map(self.host.blocks[group].__getitem__, digests))

    def _evict_unpinned(self, reason: str) -> None:
        """Evict all cached blocks on the device that no node pins and no sequence references."""
        for pool in self.pools:
            self.registry.evict(pool.group, list(pool.evictable), reason)

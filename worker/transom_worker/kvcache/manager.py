"""`KvCache`: the blocks of every group and sequence, and the cache that finished sequences leave behind.

A sequence `begin`s at a hit, is `extend`ed before each step, `advance`d when a step's result arrives (filled blocks are published,
those outside `live` freed) and `release`d. Blocks are freed by processed tokens only, never by scheduled ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from transom_worker.errors import ConfigError
from transom_worker.kvcache import outcome
from transom_worker.kvcache.allocator import BlockAllocator
from transom_worker.kvcache.arena import Arena
from transom_worker.kvcache.catalog import Catalog
from transom_worker.kvcache.checkpoints import Checkpoints
from transom_worker.kvcache.compaction import BlockCopy, Compaction
from transom_worker.kvcache.events import CacheShape, KvUpdate
from transom_worker.kvcache.eviction import EvictionPolicy, ReturnTimePolicy
from transom_worker.kvcache.headroom import num_that_fit
from transom_worker.kvcache.hit import Hit, find_hit, hit_limit
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.kvcache.picture import CachePicture, GroupCopy, copy_group, take_group_pictures
from transom_worker.kvcache.pool import GroupPool
from transom_worker.kvcache.publishing import Publishing
from transom_worker.kvcache.retention import Retention
from transom_worker.kvcache.sequence import BlockTable, SequenceBlocks
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
        _check_blocks(layout, block_size)
        self.layout = layout
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._clock = clock
        self.window_repair = window_repair
        self.retentions = tuple(Retention(group.spec) for group in layout.groups)
        self.arena = Arena(layout)
        self.pools = [GroupPool(self.arena, group) for group in range(len(layout.groups))]
        self._catalog = Catalog(layout, self.pools, block_size=block_size, clock=clock)
        self.index = self._catalog.index
        self.num_releases = 0  # grows whenever blocks may have come free
        self._checkpoints = Checkpoints(
            layout,
            self.retentions,
            policy or ReturnTimePolicy(),
            block_size=block_size,
            repair=window_repair,
            present=self._catalog.has,
            hold=self._catalog.hold,
            let_go=self._catalog.let_go,
        )
        self._allocator = BlockAllocator(self.arena, self.pools, self._catalog.evict, self._checkpoints.give_up_one)
        self._running: dict[int, SequenceBlocks] = {}  # by id()
        self._publishing = Publishing(self._catalog, self._checkpoints, self.retentions, block_size=block_size)
        self._copies: list[BlockCopy] = []
        self._compaction = Compaction(self.arena, self.pools, self._catalog, self._running, self._copies)
        self._outcome: Counter[str] = Counter()
        self._outcome_requests: Counter[str] = Counter()
        self._num_repairs = 0
        self._repair_tokens = 0

    # Searching

    def find(self, chain: Sequence[bytes], num_tokens: int) -> Hit:
        """The longest reusable prefix of `num_tokens` known tokens; at least one is left to compute."""
        limit = hit_limit(num_tokens, self.block_size)
        return find_hit(self.retentions, self.index.groups, chain, limit, window_repair=self.window_repair)

    def count_outcome(
        self, hit: Hit | None, chain: Sequence[bytes], *, num_tokens: int, num_prompt_tokens: int
    ) -> dict[str, int]:
        """Count a request's prompt tokens once, at its first admission; returns them by outcome. `hit` None: it reads no cache by
        policy."""
        tokens = {outcome.POLICY: num_prompt_tokens}
        if hit is not None:
            tokens = outcome.classify(
                hit,
                chain,
                self.index,
                num_tokens=num_tokens,
                num_prompt_tokens=num_prompt_tokens,
                block_size=self.block_size,
            )
        self._outcome.update(tokens)
        self._outcome_requests[outcome.of_request(tokens)] += 1
        return tokens

    # A sequence's life

    def begin(
        self, chain: list[bytes], root: bytes, *, hit: Hit | None = None, publishes: bool = True
    ) -> SequenceBlocks:
        """Start a sequence on the cached blocks of a hit (None: on nothing).

        Where the hit needs a repair, the sliding groups begin empty at `hit.start`, their sink blocks apart.
        """
        units, start = (hit.num_units, hit.start) if hit else (0, 0)
        blocks = self._blank(chain, root, start, publishes)
        blocks.num_published = units
        if start < units * self.block_size:
            blocks.replay_from, blocks.replay_until = start, units * self.block_size
        for group, table in enumerate(blocks.tables):
            found = self.index.groups[group]
            shared = [found[digest] for digest in self._shared_digests(group, table, blocks, units)]
            self._catalog.ref(group, shared)
            table.append(shared)
        blocks.capacity_tokens = start
        blocks.hit = hit
        blocks.base = self._checkpoints.lock(chain, units)
        return blocks

    def plan_checkpoints(
        self, blocks: SequenceBlocks, boundaries: Sequence[tuple[int, CheckpointKind]], *, is_new: bool = True
    ) -> None:
        """A sequence is admitted: keep what is live at these boundaries (units, beyond the hit) when `advance` passes them.

        Where chains were seen to part, a checkpoint is added. From a new request the cache learns what clients come back to.
        """
        if blocks.replay_until:
            self._num_repairs += 1
            self._repair_tokens += blocks.replay_until - blocks.replay_from
        if not blocks.publishes:
            return
        planned: dict[int, CheckpointKind] = {}
        hit = blocks.hit
        if hit is not None:
            self._checkpoints.admitted(blocks.base, hit.num_units)
            if is_new:
                blocks.turns = self._checkpoints.arrive(blocks.chain, hit.limit, blocks.base)
            elif blocks.base is not None:
                blocks.turns = blocks.base.turns
            parted = hit.full_reach > hit.num_units or blocks.replay_until > 0
            if parted and any(retention.keeps_everything for retention in self.retentions):
                planned[hit.full_reach] = CheckpointKind.FORK
        planned.update(boundaries)
        blocks.planned = sorted(planned.items())

    def fork(self, parent: SequenceBlocks, num_tokens: int) -> SequenceBlocks:
        """Start a sequence on a running one's first `num_tokens` tokens, which must be all that the parent processed.

        Whole blocks are shared; the last one, if part-filled, is copied, since both will write it (see `take_copies`).

        Raises:
            ValueError: no room for that block in some group.
        """
        units = num_tokens // self.block_size
        child = self._blank(parent.chain[:units], parent.root, num_tokens, parent.publishes)
        child.num_published = units
        child.capacity_tokens = units * self.block_size
        for group, table in enumerate(child.tables):
            whole = num_tokens // self.retentions[group].block_size
            shared = [parent.tables[group].at(block) for block in self._live_blocks(table, whole)]
            table.append([block for block in shared if block is not None])
            self._catalog.ref(group, [*table.pinned, *table.run])
        if not self.extend(child, num_tokens):
            self.release(child, kind=None)
            raise ValueError("no room for the copy of a part-filled block; free some first")
        for group, table in enumerate(child.tables):
            size = self.retentions[group].block_size
            if num_tokens % size:
                source, target = parent.tables[group].at(num_tokens // size), table.at(num_tokens // size)
                assert source is not None
                assert target is not None
                self._copies.append(BlockCopy(group, source, target))
        return child

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
            self._drop_cached("compaction")
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
                self._catalog.taken(group, ids)
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
                self._catalog.unref(group, fallen)
                self.num_releases += len(fallen)
                blocks.changed = True
            blocks.next_event = min(blocks.next_event, retention.next_change(processed))

    def release(self, blocks: SequenceBlocks, *, kind: CheckpointKind | None = CheckpointKind.GENERATION) -> None:
        """Drop all references; `kind` keeps a checkpoint at the last whole unit processed, None keeps none."""
        self.num_releases += 1
        units = blocks.processed // self.block_size
        complete = blocks.publishes and blocks.processed >= blocks.replay_until and units <= blocks.num_published
        if kind is not None and units and complete:
            self._publishing.place(blocks, units, kind)
        for group, table in enumerate(blocks.tables):
            self._catalog.unref(group, [*reversed(table.run), *reversed(table.pinned)])
            table.pinned, table.run = [], []
        if blocks.base is not None:
            self._checkpoints.unlock(blocks.base)
            blocks.base = None
        del self._running[id(blocks)]

    # Bounds

    def worst_case_pages(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` tokens, its last one sampled but never computed, needs at its peak."""
        computed = num_tokens - 1  # the last token's successor is never asked for
        if computed <= 0:
            return 0
        return sum(
            -(-retention.peak_blocks(computed) // per_page)
            for retention, per_page in zip(self.retentions, self.arena.blocks_per_page, strict=True)
        )

    def capacity_tokens(self, limit: int) -> int:
        """Longest sequence, up to `limit` tokens, that fits the pool alone."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.worst_case_pages(middle) <= self.arena.num_pages:
                low = middle
            else:
                high = middle - 1
        return low

    def num_that_fit(self, num_tokens: int) -> int:
        """Sequences of `num_tokens` tokens that could run from now on beside those that do, all at their peak at once.

        Cached blocks count as free; none is shared.
        """
        peaks = [retention.peak_blocks(max(1, num_tokens - 1)) for retention in self.retentions]
        return num_that_fit(peaks, self.arena, self._allocator)

    # Reports

    def drop_cached(self) -> None:
        """Evict every cached block."""
        self._drop_cached("reset")
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
        return self._catalog.changes.version

    def take_update(self) -> KvUpdate | None:
        """How the index changed since the last call."""
        return self._catalog.changes.take()

    def whole_index(self) -> KvUpdate:
        """Everything that can be found now."""
        return self._catalog.changes.whole()

    def take_copies(self) -> list[BlockCopy]:
        """Block copies that the next plan must carry."""
        copies = self._copies.copy()
        self._copies.clear()
        return copies

    def stats(self) -> CacheStats:
        """Pages and blocks by state, evictions and outcomes since start."""
        return CacheStats(
            num_pages=self.arena.num_pages,
            free_pages=self.arena.num_free,
            page_bytes=self.layout.page_bytes,
            groups=self._catalog.stats(),
            outcome_tokens=dict(self._outcome),
            waste=self.arena.waste,
            outcome_requests=dict(self._outcome_requests),
            num_repairs=self._num_repairs,
            repair_tokens=self._repair_tokens,
            checkpoints=self._checkpoints.counts.stats(),
            num_compacted_blocks=self._compaction.num_moved,
        )

    def begin_pictures(self) -> None:
        """Somebody looks at blocks: note for `picture` what changes from now on. Then `copy_group` each group once."""
        self._catalog.note_touched(True)

    def copy_group(self, group: int) -> GroupCopy:
        """All blocks of a group."""
        return copy_group(self.pools[group], self._catalog, now_s=self._clock())

    def picture(self) -> CachePicture:
        """A cheap copy of counts and owners, and of the blocks that changed since the one before."""
        return CachePicture(
            owners=self.arena.owner.copy(),
            free_pages=self.arena.num_free,
            num_compacted=self._compaction.num_moved,
            num_repairs=self._num_repairs,
            outcome_tokens=dict(self._outcome),
            groups=take_group_pictures(self.pools, self._catalog),
        )

    def checkpoints_of(self, group: int, digest: bytes) -> list[tuple[Node, str]]:
        """The checkpoints that count on a block, each with the part of it that does: "chain" or "window"."""
        return self._checkpoints.counting_on(group, digest)

    def cached_age_s(self, group: int, block: int) -> float:
        """How long a cached block has not been referenced."""
        return self._clock() - self._catalog.cached_since_s(group)[block]

    def end_pictures(self) -> None:
        """Nobody looks at blocks any more: note nothing for the next picture."""
        self._catalog.note_touched(False)

    # Inside

    def _blank(self, chain: list[bytes], root: bytes, num_tokens: int, publishes: bool) -> SequenceBlocks:
        blocks = SequenceBlocks(
            tables=[
                BlockTable(num_pinned=r.num_pinned, first_block=r.first_live_block(num_tokens)) for r in self.retentions
            ],
            chain=chain,
            root=root,
            publishes=publishes and self.enable_prefix_caching,
            processed=num_tokens,
            changed=True,
        )
        self._running[id(blocks)] = blocks
        return blocks

    def _shared_digests(self, group: int, table: BlockTable, blocks: SequenceBlocks, units: int) -> list[bytes]:
        """Digests of the blocks that a sequence starts with; sets where a replay's empty tables begin."""
        retention, chain = self.retentions[group], blocks.chain
        if retention.keeps_everything:
            step = retention.block_size // self.block_size
            return chain[step - 1 : units : step]
        if blocks.replay_until:
            table.first_block = max(retention.num_pinned, blocks.replay_from // retention.block_size)
            return chain[: min(retention.num_pinned, units)]
        return [chain[block] for block in self._live_blocks(table, units)]

    def _live_blocks(self, table: BlockTable, end: int) -> list[int]:
        return [*range(min(table.num_pinned, end)), *range(table.first_block, end)]

    def _drop_cached(self, reason: str) -> None:
        while self._checkpoints.give_up_one():
            pass
        for pool in self.pools:
            self._catalog.evict(pool.group, list(pool.loose), reason)


def _check_blocks(layout: ArenaLayout, unit: int) -> None:
    for group in layout.groups:
        spec = group.spec
        allowed = max(unit, spec.ratio) if spec.keeps_everything else unit
        if spec.block_size != allowed or (spec.ratio and unit % spec.ratio and spec.ratio % unit):
            entry = f" and entries of {spec.ratio}" if spec.ratio else ""
            raise ConfigError(
                f"KV group {spec.name} has blocks of {spec.block_size} tokens{entry}, and prefixes are hashed in units of "
                f"{unit}; give --block-size a power of two, so that units and entries fit into each other."
            )

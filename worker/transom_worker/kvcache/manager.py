"""`KvCache`: the blocks of every group and sequence, and the cache that finished sequences leave behind.

A sequence `begin`s at a hit, is `extend`ed before each step, `advance`d when a step's result arrives (filled blocks are published,
those outside `live` freed) and `release`d. Blocks are freed by processed tokens only, never by scheduled ones.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from transom_worker.errors import ConfigError
from transom_worker.kvcache import outcome
from transom_worker.kvcache.allocator import BlockAllocator
from transom_worker.kvcache.arena import Arena
from transom_worker.kvcache.events import KvEvent
from transom_worker.kvcache.hashing import extend_chain
from transom_worker.kvcache.hit import Hit, find_hit, hit_limit
from transom_worker.kvcache.index import PrefixIndex
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.kvcache.pool import KEPT, LEFT_BEHIND, GroupPool
from transom_worker.kvcache.retention import Retention
from transom_worker.kvcache.sequence import BlockTable, SequenceBlocks
from transom_worker.kvcache.stats import CacheStats, GroupStats

REMEMBERED_EVICTIONS = 65_536
MAX_UNREAD_EVENTS = 65_536
DEVICE_TIER = 0


class BlockCopy(NamedTuple):
    """Contents of `source` must be in `target` before the next forward pass."""

    group: int
    source: int
    target: int


class KvCache:
    """Owns every block of one worker. Not thread-safe.

    Raises:
        ConfigError: a group's block is not the hash unit, or a page holds none of its blocks.
    """

    def __init__(self, layout: ArenaLayout, *, block_size: int, enable_prefix_caching: bool = True) -> None:
        for group in layout.groups:
            if group.spec.block_size != block_size:
                raise ConfigError(
                    f"KV group {group.spec.name} has blocks of {group.spec.block_size} tokens and the hash unit has "
                    f"{block_size}; only equal sizes are supported so far."
                )
        self.layout = layout
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.retentions = tuple(Retention(group.spec) for group in layout.groups)
        self.index = PrefixIndex(len(layout.groups), remembered=REMEMBERED_EVICTIONS)
        self.arena = Arena(layout)
        self.pools = [GroupPool(self.arena, group) for group in range(len(layout.groups))]
        self.num_releases = 0  # grows whenever blocks may have come free
        self._allocator = BlockAllocator(self.arena, self.pools, self._evict)
        self._tick = 0
        self._version = 0
        self._events: deque[KvEvent] = deque(maxlen=MAX_UNREAD_EVENTS)
        self._copies: list[BlockCopy] = []
        self._evicted: tuple[Counter[str], ...] = tuple(Counter() for _ in layout.groups)
        self._outcome: Counter[str] = Counter()

    # Searching

    def find(self, chain: Sequence[bytes], num_tokens: int) -> Hit:
        """The longest reusable prefix of `num_tokens` known tokens; at least one is left to compute."""
        return find_hit(self.retentions, self.index.groups, chain, hit_limit(num_tokens, self.block_size))

    def count_outcome(
        self, hit: Hit | None, chain: Sequence[bytes], *, num_tokens: int, num_prompt_tokens: int
    ) -> None:
        """Count a request's prompt tokens once, at its first admission. `hit` None: it reads no cache by policy."""
        if hit is None:
            self._outcome[outcome.POLICY] += num_prompt_tokens
            return
        self._outcome.update(
            outcome.classify(
                hit,
                chain,
                self.index,
                num_tokens=num_tokens,
                num_prompt_tokens=num_prompt_tokens,
                block_size=self.block_size,
            )
        )

    # A sequence's life

    def begin(self, chain: list[bytes], root: bytes, *, num_units: int = 0, publishes: bool = True) -> SequenceBlocks:
        """Start a sequence on the cached blocks of its first `num_units` units, which must be a hit."""
        blocks = self._blank(chain, root, num_units * self.block_size, publishes)
        for group, table in enumerate(blocks.tables):
            found, pool = self.index.groups[group], self.pools[group]
            shared = [found[chain[unit]] for unit in self._live_units(table, num_units)]
            for block in shared:
                pool.ref(block)
            table.append(shared)
        return blocks

    def fork(self, parent: SequenceBlocks, num_tokens: int) -> SequenceBlocks:
        """Start a sequence on a running one's first `num_tokens` tokens, which must be all that the parent processed.

        Whole blocks are shared; the last one, if part-filled, is copied, since both will write it (see `take_copies`).

        Raises:
            ValueError: no room for that block in some group.
        """
        units = num_tokens // self.block_size
        child = self._blank(parent.chain[:units], parent.root, num_tokens, parent.publishes)
        child.capacity_tokens = units * self.block_size
        for group, table in enumerate(child.tables):
            shared = [parent.tables[group].at(unit) for unit in self._live_units(table, units)]
            table.append([block for block in shared if block is not None])
            for block in table.pinned + table.run:
                self.pools[group].ref(block)
        if num_tokens % self.block_size:
            if not self.extend(child, num_tokens):
                self.release(child)
                raise ValueError("no room for the copy of a part-filled block; free some first")
            for group, table in enumerate(child.tables):
                source, target = parent.tables[group].at(units), table.at(units)
                assert source is not None
                assert target is not None
                self._copies.append(BlockCopy(group, source, target))
        return child

    def extend(self, blocks: SequenceBlocks, end: int, *, reserve: int = 0) -> bool:
        """Give every group blocks for positions below `end`; False, and nothing changed, if memory is short.

        `reserve` blocks per group must stay within reach besides. Evicts cached blocks as needed.
        """
        end_block = -(-end // self.block_size)
        needs = [max(0, end_block - table.end_block) for table in blocks.tables]
        if reserve and self._allocator.pages_needed([need + reserve for need in needs]) is None:
            return False
        pages = self._allocator.pages_needed(needs)
        if pages is None:
            return False
        spare = self._allocator.usable_pages - sum(pages)
        for group, table in enumerate(blocks.tables):
            if needs[group]:
                share = pages[group] + spare
                ids, used = self._allocator.allocate(group, needs[group], table.last, share)
                spare = share - used
                table.append(ids)
                blocks.changed = True
        blocks.capacity_tokens = max(blocks.capacity_tokens, end_block * self.block_size)
        return True

    def advance(self, blocks: SequenceBlocks, token_ids: Sequence[int], processed: int) -> None:
        """`processed` tokens have their KV: publish filled blocks, free what nothing will read again."""
        blocks.processed = processed
        if processed < blocks.next_event:
            return
        self._publish(blocks, token_ids, processed)
        blocks.next_event = (processed // self.block_size + 1) * self.block_size
        self._tick += 1
        for pool, retention, table in zip(self.pools, self.retentions, blocks.tables, strict=True):
            if retention.keeps_everything:
                continue
            for block in table.drop_until(retention.first_live_block(processed)):
                pool.unref(block, tick=self._tick, rank=LEFT_BEHIND)
                self.num_releases += 1
                blocks.changed = True
            blocks.next_event = min(blocks.next_event, retention.next_change(processed))

    def release(self, blocks: SequenceBlocks) -> None:
        """Drop all references; published blocks stay as cache, a chain's far end being the first to go."""
        self._tick += 1
        self.num_releases += 1
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            for block in reversed(table.pinned + table.run):
                pool.unref(block, tick=self._tick, rank=KEPT)
            table.pinned, table.run = [], []

    # Bounds

    def worst_case_pages(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` tokens may need at its peak when it runs alone in an empty cache."""
        pages = 0
        for retention, per_page in zip(self.retentions, self.arena.min_blocks_per_page, strict=True):
            peak = retention.peak_blocks(num_tokens)
            everything = -(-num_tokens // self.block_size)
            # a sliding run may begin and end inside a page, and so may the pinned blocks before it
            ragged = 0 if retention.keeps_everything else 1 + bool(retention.num_pinned)
            pages += min(-(-peak // per_page) + ragged, -(-everything // per_page))
        return pages

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

    # Reports

    def drop_cached(self) -> None:
        """Evict every cached block."""
        for pool in self.pools:
            for block in list(pool.eviction_order()):
                self._evict(pool.group, block, "reset")
        self.num_releases += 1

    def take_events(self) -> list[KvEvent]:
        """Events since the last call, in order; of too many unread ones the oldest are gone, which their versions show."""
        events = list(self._events)
        self._events.clear()
        return events

    def take_copies(self) -> list[BlockCopy]:
        """Block copies that the next plan must carry."""
        copies, self._copies = self._copies, []
        return copies

    def stats(self) -> CacheStats:
        """Pages and blocks by state, evictions and outcomes since start."""
        groups = tuple(
            GroupStats(
                name=group.spec.name,
                block_bytes=group.block_bytes,
                active_blocks=pool.num_active,
                cached_blocks=pool.num_cached,
                empty_blocks=pool.num_empty,
                evicted_blocks=dict(evicted),
            )
            for group, pool, evicted in zip(self.layout.groups, self.pools, self._evicted, strict=True)
        )
        return CacheStats(
            num_pages=self.arena.num_pages,
            free_pages=self.arena.num_free,
            page_bytes=self.layout.page_bytes,
            groups=groups,
            outcome_tokens=dict(self._outcome),
        )

    def _blank(self, chain: list[bytes], root: bytes, num_tokens: int, publishes: bool) -> SequenceBlocks:
        units = num_tokens // self.block_size
        return SequenceBlocks(
            tables=[
                BlockTable(num_pinned=r.num_pinned, first_block=r.first_live_block(num_tokens)) for r in self.retentions
            ],
            chain=chain,
            root=root,
            publishes=publishes and self.enable_prefix_caching,
            processed=num_tokens,
            num_published=units,
            capacity_tokens=units * self.block_size,
            changed=True,
        )

    def _live_units(self, table: BlockTable, units: int) -> list[int]:
        return [*range(min(table.num_pinned, units)), *range(table.first_block, units)]

    def _publish(self, blocks: SequenceBlocks, token_ids: Sequence[int], processed: int) -> None:
        units = processed // self.block_size
        if not blocks.publishes or units <= blocks.num_published:
            return
        if len(blocks.chain) < units:
            extend_chain(blocks.chain, blocks.root, token_ids, self.block_size)
        for unit in range(blocks.num_published, units):
            digest = blocks.chain[unit]
            for group, table in enumerate(blocks.tables):
                block = table.at(unit)
                if block is not None and self.index.add(group, digest, block):
                    self.pools[group].published[block] = (digest, unit)
                    self._emit("added", group, digest, unit)
        blocks.num_published = units

    def _evict(self, group: int, block: int, reason: str) -> None:
        digest, unit = self.pools[group].evict(block)
        self.index.remove(group, digest)
        self._evicted[group][reason] += 1
        self._emit("removed", group, digest, unit)

    def _emit(self, action: Literal["added", "removed"], group: int, digest: bytes, unit: int) -> None:
        self._version += 1
        self._events.append(KvEvent(self._version, action, group, digest, unit, self.block_size, DEVICE_TIER))

"""`BlockRegistry`: has one tier's arena and block pools, keeps the prefix index consistent with them, and counts what happens to
published blocks.
`BlockTimes` measures how long they stay in the prefix cache before they are hit or evicted.

Every change of a block's state goes through the registry, so that index, pools, events for routers, times and counts agree. For the
block map the registry records which blocks were *touched* (changed in any way since the last snapshot, `cache_snapshot`), and which
of these have *moved* to the other tier.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from transom_core.kv_cache.layout import ArenaLayout
from transom_core.telemetry.histogram import Histogram
from transom_worker.kvcache.blocks.arena import Arena
from transom_worker.kvcache.blocks.block_table import BlockTable
from transom_worker.kvcache.blocks.pool import GroupPool
from transom_worker.kvcache.prefix.change_log import ChangeLog
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex
from transom_worker.kvcache.stats import GroupStats

# Upper bounds of the histograms' buckets, in seconds.
BOUNDS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10800.0, 43200.0)


class BlockRegistry:
    """One tier's arena, with the pools of all groups, and its part of the prefix index.

    A block is published in its pool exactly while the index has it. `clock` gives seconds.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        index: PrefixIndex,
        changes: ChangeLog,
        *,
        tier: int,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.layout = layout
        self.arena = Arena(layout)
        self.pools = [GroupPool(self.arena, group) for group in range(len(layout.groups))]
        self.index = index
        self.changes = changes
        self.block_size = block_size
        self._tier = tier
        self._found = index.tiers[tier]
        self._hash_blocks_per_block = [group.spec.block_size // block_size for group in layout.groups]
        self.times = [BlockTimes(layout.num_block_ids(group), clock) for group in range(len(layout.groups))]
        self._evicted: tuple[Counter[str], ...] = tuple(Counter() for _ in layout.groups)
        self._touched: tuple[set[int], ...] | None = None  # by group; None while no block map is watched

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether the index has a block of the group under the digest."""
        return digest in self._found[group]

    def has_all(self, group: int, chain: Sequence[bytes], begin: int, end: int) -> bool:
        """Return whether the index has all of the group's logical blocks `[begin, end)` of a chain."""
        step, found = self._hash_blocks_per_block[group], self._found[group]
        return all(chain[(block + 1) * step - 1] in found for block in range(begin, end))

    def publish(self, group: int, table: BlockTable, begin: int, end: int, chain: Sequence[bytes]) -> list[bytes]:
        """Enter logical blocks `[begin, end)` of a table into the index; return the digests that were entered.

        Blocks that slid out, and digests that the index has already, are left out.
        """
        if begin >= end:
            return []
        step = self._hash_blocks_per_block[group]
        found = self._found[group]
        digests = chain[(begin + 1) * step - 1 : end * step : step]
        blocks, names = [], []
        for logical, digest, block in zip(range(begin, end), digests, table.blocks(begin, end), strict=True):
            if block is not None and digest not in found:
                blocks.append(block)
                names.append((digest, logical))
        self.enter(group, blocks, names)
        return [digest for digest, _ in names]

    def enter(self, group: int, blocks: Sequence[int], names: Sequence[tuple[bytes, int]]) -> None:
        """Enter active blocks into the index under these (digest, logical index) pairs; the index must not have the digests."""
        if not blocks:
            return
        digests = [digest for digest, _ in names]
        self._found[group].update(zip(digests, blocks, strict=True))
        self.pools[group].published.update(zip(blocks, names, strict=True))
        self.changes.add("added", self._tier, group, digests)
        self.touch(group, blocks)

    def withdraw(self, group: int, blocks: Sequence[int]) -> None:
        """Remove active blocks from the index; they become free when no sequence references them any more."""
        if not blocks:
            return
        published = self.pools[group].published
        self._forget(group, blocks, [published.pop(block) for block in blocks])

    def forget(self, group: int, blocks: Iterable[int]) -> None:
        """Free evictable blocks that the other tier has from now on. They are not counted as evicted."""
        blocks = list(blocks)
        if blocks:
            self._forget(group, blocks, self.pools[group].evict(blocks))

    def moved(self, group: int, source: int, target: int) -> None:
        """Note that compaction (moving blocks together to clear a page) moved a block, published or not, to another id."""
        entry = self.pools[group].published.get(target)
        if entry is not None:
            self._found[group][entry[0]] = target
        self.touch(group, (source, target))

    def pin(self, group: int, digests: Iterable[bytes]) -> None:
        """Pin the blocks under these digests for a checkpoint."""
        self.pools[group].pin(self._blocks(group, digests))

    def unpin(self, group: int, digests: Iterable[bytes]) -> None:
        """Remove a checkpoint's pin from the blocks under these digests."""
        self.pools[group].unpin(self._blocks(group, digests))

    def ref(self, group: int, blocks: Sequence[int]) -> None:
        """Add a sequence's reference to each of these blocks."""
        self.times[group].hit(self.pools[group].ref(blocks))
        self.touch(group, blocks)

    def unref(self, group: int, blocks: Sequence[int]) -> None:
        """Remove a sequence's reference from each of these blocks."""
        self.times[group].cached(self.pools[group].unref(blocks))
        self.touch(group, blocks)

    def evict(self, group: int, blocks: list[int], reason: str) -> None:
        """Evict these evictable blocks, and count them under `reason`."""
        if not blocks:
            return
        digests = [digest for digest, _ in self.pools[group].evict(blocks)]
        self.index.remove(group, digests, tier=self._tier)
        self.times[group].evicted(blocks)
        self._evicted[group][reason] += len(blocks)
        self.changes.add("removed", self._tier, group, digests)
        self.touch(group, blocks)

    def touch(self, group: int, blocks: Iterable[int]) -> None:
        """Record that blocks have changed, such as free ones that were allocated to a sequence."""
        if self._touched is not None:
            self._touched[group].update(blocks)

    def watch_changes(self, is_on: bool) -> None:
        """Begin to record which blocks change in any way, or stop recording it."""
        self._touched = self._none() if is_on else None

    def take_touched(self) -> tuple[set[int], ...]:
        """Return, by group, the blocks that changed since the last call; empty sets unless changes are recorded."""
        touched = self._touched or self._none()
        if self._touched is not None:
            self._touched = self._none()
        return touched

    def num_evicted(self) -> list[dict[str, int]]:
        """Return, by group, the number of blocks evicted since start, by reason."""
        return [dict(evicted) for evicted in self._evicted]

    def stats(self) -> tuple[GroupStats, ...]:
        """Return every group's blocks by state, and its evictions and times since start."""
        return tuple(
            GroupStats(
                name=group.spec.name,
                block_bytes=group.block_bytes,
                active_blocks=pool.num_active,
                cached_blocks=pool.num_cached,
                free_blocks=pool.num_free,
                pinned_blocks=pool.num_pinned,
                evicted_blocks=dict(evicted),
                residency=times.residency.buckets(),
                reuse_interval=times.reuse_interval.buckets(),
            )
            for group, pool, evicted, times in zip(
                self.layout.groups, self.pools, self._evicted, self.times, strict=True
            )
        )

    def _forget(self, group: int, blocks: Sequence[int], names: Sequence[tuple[bytes, int]]) -> None:
        """Remove blocks from the index, which had them under these names. Later searches do not count them as evicted."""
        digests = [digest for digest, _ in names]
        self.index.forget(group, digests, tier=self._tier)
        self.changes.add("removed", self._tier, group, digests)
        self.touch(group, blocks)

    def _none(self) -> tuple[set[int], ...]:
        """Return an empty set for each group."""
        return tuple(set() for _ in self.layout.groups)

    def _blocks(self, group: int, digests: Iterable[bytes]) -> Iterable[int]:
        """Return the block ids under these digests, and record them as changed."""
        blocks = map(self._found[group].__getitem__, digests)
        if self._touched is None:
            return blocks
        known = list(blocks)
        self._touched[group].update(known)
        return known


class BlockTimes:
    """Two histograms over one group's blocks: `residency` from cached to evicted, `reuse_interval` from cached to hit.

    A published block is cached from the moment when the last running sequence stops using it. Example: if that happens at second
    10, and a sequence hits the block at second 13, the reuse interval is 3 s. `clock` gives seconds.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self.residency = Histogram(BOUNDS_S)
        self.reuse_interval = Histogram(BOUNDS_S)
        self._clock = clock
        self._since_s = [0.0] * num_blocks  # by block: when its last reference was removed

    def cached(self, blocks: Sequence[int]) -> None:
        """Note that these blocks lost their last references just now and can be hit."""
        if blocks:
            now_s, since_s = self._clock(), self._since_s
            for block in blocks:
                since_s[block] = now_s

    def hit(self, blocks: Sequence[int]) -> None:
        """Note that sequences hit these blocks, which were cached until now."""
        if blocks:
            now_s = self._clock()
            for since_s in map(self._since_s.__getitem__, blocks):
                self.reuse_interval.observe(now_s - since_s)

    def since_s(self) -> list[float]:
        """Return a copy of the times at which blocks lost their last reference, by block; 0 if that never happened."""
        return self._since_s.copy()

    def age_s(self, block: int) -> float:
        """Return how long ago a block's last reference was removed."""
        return self._clock() - self._since_s[block]

    def evicted(self, blocks: Sequence[int]) -> None:
        """Note that these blocks were evicted just now."""
        now_s = self._clock()
        for since_s in map(self._since_s.__getitem__, blocks):
            self.residency.observe(now_s - since_s)

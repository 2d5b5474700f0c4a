"""What can be found under which digest, and what became of it: names given and taken, events, times, evictions by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from transom_worker.kvcache.block_times import BlockTimes
from transom_worker.kvcache.change_log import ChangeLog
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.kvcache.pool import GroupPool
from transom_worker.kvcache.prefix_index import PrefixIndex
from transom_worker.kvcache.sequence import BlockTable
from transom_worker.kvcache.stats import GroupStats

REMEMBERED_EVICTIONS = 262_144


class BlockRegistry:
    """Index and pools of all groups kept in step: a block is published in its pool exactly while the index has it."""

    def __init__(
        self, layout: ArenaLayout, pools: Sequence[GroupPool], *, block_size: int, clock: Callable[[], float]
    ) -> None:
        self.index = PrefixIndex(len(layout.groups), remembered=REMEMBERED_EVICTIONS)
        self._layout = layout
        self._pools = pools
        self._units_per_block = [group.spec.block_size // block_size for group in layout.groups]
        self._times = [BlockTimes(layout.num_block_ids(group), clock) for group in range(len(layout.groups))]
        self._evicted: tuple[Counter[str], ...] = tuple(Counter() for _ in layout.groups)
        self.changes = ChangeLog(self.index.groups)
        self._touched: tuple[set[int], ...] | None = None  # since `take_touched`, while somebody looks at blocks

    def has(self, group: int, digest: bytes) -> bool:
        """Whether a block of the group is found under the digest."""
        return digest in self.index.groups[group]

    def has_all(self, group: int, chain: Sequence[bytes], begin: int, end: int) -> bool:
        """Whether the group's logical blocks `[begin, end)` of a chain are all found."""
        step, found = self._units_per_block[group], self.index.groups[group]
        return all(chain[(block + 1) * step - 1] in found for block in range(begin, end))

    def name(self, group: int, table: BlockTable, begin: int, end: int, chain: Sequence[bytes]) -> None:
        """Make logical blocks `[begin, end)` findable, as far as they are there and no twin of theirs is."""
        if begin >= end:
            return
        step = self._units_per_block[group]
        found, published = self.index.groups[group], self._pools[group].published
        digests = chain[(begin + 1) * step - 1 : end * step : step]
        named = []
        for logical, digest, block in zip(range(begin, end), digests, table.blocks(begin, end), strict=True):
            if block is not None and digest not in found:
                found[digest] = block
                published[block] = (digest, logical)
                named.append(digest)
        if named:
            self.changes.add("added", group, named)
            if self._touched is not None:
                self._touched[group].update(map(found.__getitem__, named))

    def moved(self, group: int, source: int, target: int) -> None:
        """Compaction moved a block, with its name if it had one."""
        entry = self._pools[group].published.get(target)
        if entry is not None:
            self.index.groups[group][entry[0]] = target
        if self._touched is not None:
            self._touched[group].update((source, target))

    def pin(self, group: int, digests: Iterable[bytes]) -> None:
        """A checkpoint counts on the blocks under these digests."""
        self._pools[group].pin(self._blocks(group, digests))

    def unpin(self, group: int, digests: Iterable[bytes]) -> None:
        """A checkpoint no longer does."""
        self._pools[group].unpin(self._blocks(group, digests))

    def ref(self, group: int, blocks: Sequence[int]) -> None:
        """A sequence references blocks."""
        self._times[group].hit(self._pools[group].ref(blocks))
        if self._touched is not None:
            self._touched[group].update(blocks)

    def unref(self, group: int, blocks: Sequence[int]) -> None:
        """A sequence no longer does."""
        self._times[group].cached(self._pools[group].unref(blocks))
        if self._touched is not None:
            self._touched[group].update(blocks)

    def evict(self, group: int, blocks: list[int], reason: str) -> None:
        """Loose blocks go."""
        if not blocks:
            return
        entries = self._pools[group].evict(blocks)
        digests = [digest for digest, _ in entries]
        self.index.remove(group, digests)
        self._times[group].evicted(blocks)
        self._evicted[group][reason] += len(blocks)
        self.changes.add("removed", group, digests)
        if self._touched is not None:
            self._touched[group].update(blocks)

    def taken(self, group: int, blocks: Iterable[int]) -> None:
        """Empty blocks were given to a sequence."""
        if self._touched is not None:
            self._touched[group].update(blocks)

    def note_touched(self, wanted: bool) -> None:
        """Begin to note which blocks change in any way, from none on, or end it."""
        self._touched = tuple(set() for _ in self._layout.groups) if wanted else None

    def take_touched(self) -> tuple[set[int], ...]:
        """By group, the blocks that changed since the last call; empty unless that is noted."""
        touched = self._touched or tuple(set() for _ in self._layout.groups)
        if self._touched is not None:
            self._touched = tuple(set() for _ in self._layout.groups)
        return touched

    def cached_since_s(self, group: int) -> list[float]:
        """By block, on the cache's clock, when its last reference went; 0 where none ever did. A copy."""
        return self._times[group].since_s()

    def cached_age_s(self, group: int, block: int) -> float:
        """How long ago a block's last reference went."""
        return self._times[group].age_s(block)

    def num_evicted(self) -> list[dict[str, int]]:
        """By group, blocks evicted since start by reason."""
        return [dict(evicted) for evicted in self._evicted]

    def stats(self) -> tuple[GroupStats, ...]:
        """Every group's blocks by state, evictions and times since start."""
        return tuple(
            GroupStats(
                name=group.spec.name,
                block_bytes=group.block_bytes,
                active_blocks=pool.num_active,
                cached_blocks=pool.num_cached,
                free_blocks=pool.num_free,
                pinned_blocks=pool.num_pinned,
                evicted_blocks=dict(evicted),
                residency=times.residency.stats(),
                reuse_interval=times.reuse_interval.stats(),
            )
            for group, pool, evicted, times in zip(
                self._layout.groups, self._pools, self._evicted, self._times, strict=True
            )
        )

    def _blocks(self, group: int, digests: Iterable[bytes]) -> Iterable[int]:
        blocks = map(self.index.groups[group].__getitem__, digests)
        if self._touched is None:
            return blocks
        known = list(blocks)
        self._touched[group].update(known)
        return known

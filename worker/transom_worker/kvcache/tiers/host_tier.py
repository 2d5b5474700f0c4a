"""`HostTier`: the arena in the host's memory. It takes the blocks that the device evicts, and counts how often each is needed.

    node       a boundary of the prefix tree; it needs the blocks from which a request can continue there
    spill      move a cached block from the device to the host
    load       copy blocks from the host to the device, for a sequence that hit them or was swapped
    need       a node, load, import, export or swapped sequence has one *need* of each host block that must not be dropped
    leftover   a host block in the index without needs: requests can hit it until its memory is used for another block
    twin       said of two blocks with the same digest, one on the device and one in the host tier

In its pool (`blocks.pool`) a needed block counts as *active* and a leftover as *evictable*. So the allocator, which never touches
active blocks, says exactly whether blocks fit without dropping a needed one.
"""

from collections.abc import Callable, Iterable, Sequence

from transom_core.kv_cache.layout import ArenaLayout
from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_worker.kvcache.blocks.allocator import BlockAllocator
from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.prefix.change_log import ChangeLog
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex


class HostTier:
    """The host's arena with its pools and its part of the prefix index. `clock` gives seconds."""

    def __init__(
        self,
        layout: ArenaLayout,
        index: PrefixIndex,
        changes: ChangeLog,
        *,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.layout = layout
        self.registry = BlockRegistry(layout, index, changes, tier=HOST, block_size=block_size, clock=clock)
        self.arena, self.pools = self.registry.arena, self.registry.pools
        self._allocator = BlockAllocator(self.registry, lambda: False)
        self._on_device = index.tiers[DEVICE]
        self.blocks = index.tiers[HOST]  # by group: digest -> block
        self.num_swapped_out = [0] * len(self.pools)  # blocks of preempted sequences, by group, since start

    def has_room(self, num_blocks: Sequence[int]) -> bool:
        """Return whether `num_blocks[group]` more blocks of each group fit without dropping a needed block."""
        return self._allocator.pages_needed(num_blocks) is not None

    def take(self, num_blocks: Sequence[int]) -> list[list[int]]:
        """Take `num_blocks[group]` blocks of each group and return their ids. They begin with one need and are not in the index.

        There must be room (`has_room`).
        """
        taken = self._allocator.allocate_all(num_blocks, [None] * len(num_blocks))
        assert taken is not None
        for group, blocks in enumerate(taken):
            self.registry.touch(group, blocks)
        return taken

    @property
    def exists(self) -> bool:
        """Whether there is a host tier. If not, its arena has no pages, so no block ever moves there."""
        return self.arena.num_pages > 0

    def need(self, group: int, blocks: Iterable[int]) -> None:
        """Count one more need of each of these blocks."""
        self.registry.ref(group, list(blocks))

    def release(self, group: int, blocks: Iterable[int]) -> None:
        """Count one need less of each of these blocks.

        A block without needs becomes a leftover if it is in the index and has no twin on the device; else it is freed.
        """
        blocks = list(blocks)
        pool, on_device = self.pools[group], self._on_device[group]
        self.registry.unref(group, blocks)
        twins = [block for block in blocks if block in pool.evictable and pool.published[block][0] in on_device]
        self.registry.forget(group, dict.fromkeys(twins))

    def pin(self, group: int, digests: Iterable[bytes]) -> None:
        """Count one more need of each of the blocks under these digests, for a node of the prefix tree."""
        self.need(group, map(self.blocks[group].__getitem__, digests))

    def unpin(self, group: int, digests: Iterable[bytes]) -> None:
        """Count one need less of each of the blocks under these digests."""
        self.release(group, map(self.blocks[group].__getitem__, digests))

    def forget_leftovers(self, group: int, digests: Iterable[bytes]) -> None:
        """Free those of the blocks under these digests that are leftovers; the device has blocks with these digests."""
        found, evictable = self.blocks[group], self.pools[group].evictable
        blocks = [found[digest] for digest in digests if digest in found]
        self.registry.forget(group, [block for block in blocks if block in evictable])

    def empty(self, reason: str) -> None:
        """Evict all leftovers, and withdraw the needed blocks from the index. No node may need any block."""
        for group, pool in enumerate(self.pools):
            self.registry.evict(group, list(pool.evictable), reason)
            self.registry.withdraw(group, list(pool.published))

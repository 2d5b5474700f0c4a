"""`DiskStores`: sends the blocks of nodes that leave the cache's memory to the disk tier.

When a node is dropped, its blocks are free, but keep their contents until a later step or copy overwrites them. So it is enough to
queue a copy to the disk, which the ranks make before any copy or step that comes later. Blocks that no node pins are never stored,
since they are rarely a whole prefix that could be hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from transom_worker.kvcache.blocks.copy_queue import CopyQueue
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex
from transom_worker.kvcache.prefix.tree import Node


class DiskStores:
    """Queues copies of nodes' blocks to the disk. `index` finds the blocks; `block_bytes[group]` is the size of a block."""

    def __init__(self, index: PrefixIndex, copies: CopyQueue, *, block_bytes: Sequence[int]) -> None:
        self.is_on = False  # whether there is a disk tier
        self._index = index
        self._copies = copies
        self._block_bytes = block_bytes

    def store(self, node: Node, *, with_segment: bool) -> None:
        """Store a node's windows, and with `with_segment` its segment too; do nothing without a disk tier."""
        if not self.is_on:
            return
        for group, digests in chain(node.segment_blocks() if with_segment else (), node.window_blocks()):
            self._store(group, digests)

    def store_in_pieces(self, nodes: Iterable[Node], *, piece_bytes: int) -> Iterator[None]:
        """Store these nodes, and yield whenever about `piece_bytes` of copies are queued. The caller must take the queued copies
        before it continues."""
        num_queued, stored = len(self._copies.waiting), 0
        for node in nodes:
            self.store(node, with_segment=True)
            stored += sum(self._block_bytes[copy.group] for copy in self._copies.waiting[num_queued:])
            num_queued = len(self._copies.waiting)
            if stored >= piece_bytes:
                yield
                num_queued, stored = len(self._copies.waiting), 0
        if num_queued:
            yield

    def _store(self, group: int, digests: Iterable[bytes]) -> None:
        for digest in digests:
            # From the first tier that has the block: the device, or else the host.
            for tier, groups in enumerate(self._index.tiers):
                if digest in groups[group]:
                    self._copies.add_store(group, groups[group][digest], tier, digest)
                    break

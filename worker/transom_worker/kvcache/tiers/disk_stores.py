"""`DiskStores`: hands the blocks of nodes that leave the cache's memory to the disk tier.

A *node* of the prefix tree pins a segment of a chain and, at a checkpoint, windows (`tree`). When a node is dropped, its blocks are
still where they were until other contents take their place. So a copy to the disk is queued, and the ranks make it before any copy
that is queued later. Blocks that no node pins are never stored: they would not be found again as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from transom_worker.kvcache.blocks.block_copies import CopyQueue
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex
from transom_worker.kvcache.prefix.tree import Node, PrefixTree


class DiskStores:
    """Queues copies to the disk for nodes of `tree`, whose blocks `index` has."""

    def __init__(self, tree: PrefixTree, index: PrefixIndex, copies: CopyQueue) -> None:
        self.num_stored = 0  # blocks, since start
        self._tree = tree
        self._index = index
        self._copies = copies

    def store(self, node: Node, *, with_segment: bool) -> None:
        """Store a node's windows, and its segment `with_segment`."""
        if with_segment:
            self._tree.for_each_block(node, self._store)
        for (group, _), digests in zip(node.retentions.sliding_groups, node.windows or (), strict=False):
            self._store(group, digests)

    def _store(self, group: int, digests: Iterable[bytes]) -> None:
        for digest in digests:
            for tier, groups in enumerate(self._index.tiers):
                if digest in groups[group]:
                    self._copies.add_store(group, groups[group][digest], tier, digest)
                    self.num_stored += 1
                    break

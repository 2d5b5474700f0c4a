"""`TierMoves`: moves nodes of the prefix tree between the device and the host tier, with the blocks that they pin.

    demote     move a node's blocks from the device to the host: copies are queued, and the index changes at once
    promote    let a node in the host tier pin the device's blocks instead of the host's; a load or a sequence brought them there
    piece      the most hash blocks of a segment that are demoted at once; the rest becomes a node above. A demotion may free more
               than is needed, and that memory stays empty for a while, so a piece is a small part of the device's memory

All blocks of a segment are in one tier. A window block may be in both, if checkpoints of both tiers need it. Demoted blocks that a
running sequence still references stay on the device until it is released, but searches do not find them there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transom_core.kv_cache.layout import ArenaLayout
from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_worker.kvcache.blocks.block_copies import CopyQueue
from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.blocks.pool import GroupPool
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex
from transom_worker.kvcache.prefix.tree import Node, PrefixTree
from transom_worker.kvcache.tiers.host_tier import HostTier

MOST_IN_PIECE = 256  # hash blocks
LEAST_IN_PIECE = 16
PIECES_ON_DEVICE = 32  # the pool has room for at least this many pieces, so small pools have smaller pieces


class TierMoves:
    """Moves nodes of `tree` between the device, of this `layout`, and `host`."""

    def __init__(
        self,
        tree: PrefixTree,
        index: PrefixIndex,
        registry: BlockRegistry,
        pools: Sequence[GroupPool],
        host: HostTier,
        copies: CopyQueue,
        *,
        layout: ArenaLayout,
    ) -> None:
        self.host = host
        self.piece = _piece(layout)  # in hash blocks
        self.num_spilled = [0] * len(pools)  # blocks by group, since start
        self._tree = tree
        self._on_device = index.tiers[DEVICE]
        self._registry = registry
        self._pools = pools
        self._copies = copies

    def needs(self, node: Node, *, with_segment: bool) -> list[int]:
        """Return, by group, the most host blocks that a node's windows take, and with `with_segment` also the last piece of its
        segment."""
        needs = [0] * len(self._pools)
        if with_segment:
            num_blocks = min(len(node.segment), self.piece)
            for group, hash_blocks_per_block in node.retentions.full_groups:
                needs[group] += -(-num_blocks // hash_blocks_per_block)
            begin = node.boundary - num_blocks
            for group, num_sink_blocks in node.retentions.sliding_groups:
                needs[group] += max(0, min(node.boundary, num_sink_blocks) - begin)
        if node.windows_tier == DEVICE:
            for group, digests in node.window_blocks():
                needs[group] += len(digests)
        return needs

    def demote(self, node: Node, *, with_segment: bool) -> None:
        """Move a node's windows to the host, which must have room, and with `with_segment` its segment, at most one piece."""
        digests: list[list[bytes]] = [[] for _ in self._pools]
        if with_segment:
            for group, of_segment in node.segment_blocks():
                digests[group].extend(of_segment)
        if node.windows_tier == DEVICE:
            for group, of_windows in node.window_blocks():
                digests[group].extend(reversed(of_windows))
        self._spill(digests)
        if with_segment:
            self._tree.set_tier(node, HOST)
        node.windows_tier = HOST

    def promote(self, node: Node) -> list[Node]:
        """Promote a node and its ancestors, as far as the device has all their blocks; return the nodes that changed."""
        if node.parent is None:  # the node was dropped
            return []
        path = []
        above: Node | None = node
        while above is not None and above.tier == HOST:
            path.append(above)
            above = above.parent
        changed = []
        for each in reversed(path):
            if not self._has_all(each.segment_blocks()):
                break
            for group, digests in each.segment_blocks():
                self._registry.pin(group, digests)
            for group, digests in each.segment_blocks():
                self.host.unpin(group, digests)
            self._tree.set_tier(each, DEVICE)
            self._promote_windows(each)
            changed.append(each)
        if node not in changed and node.tier == DEVICE and self._promote_windows(node):
            changed.append(node)
        return changed

    def _promote_windows(self, node: Node) -> bool:
        """Let a node pin its windows on the device, if the device has all their blocks; return whether that changed anything."""
        if node.windows_tier == DEVICE or not self._has_all(node.window_blocks()):
            return False
        for group, digests in node.window_blocks():
            self._registry.pin(group, digests)
            self.host.unpin(group, digests)
        node.windows_tier = DEVICE
        return True

    def _has_all(self, blocks: Iterable[tuple[int, Iterable[bytes]]]) -> bool:
        """Return whether the device has all of these blocks, given as (group, digests)."""
        return all(all(map(self._on_device[group].__contains__, digests)) for group, digests in blocks)

    def _spill(self, digests: Sequence[list[bytes]]) -> None:
        """Move the device's blocks under these digests, which are given by group and which one node pins, to the host."""
        host = self.host
        new = []
        for group, of_group in enumerate(digests):
            found = host.blocks[group]
            # Drop the twins that nothing needs: a leftover may be in a page that was counted as room.
            host.forget_leftovers(group, of_group)
            host.need(group, [found[digest] for digest in of_group if digest in found])
            new.append([digest for digest in reversed(of_group) if digest not in found])
        for group, targets in enumerate(host.take([len(of_group) for of_group in new])):
            sources = [self._on_device[group][digest] for digest in new[group]]
            host.registry.enter(group, targets, [self._pools[group].published[source] for source in sources])
            for source, target in zip(sources, targets, strict=True):
                self._copies.add(group, source, target, source_tier=DEVICE, target_tier=HOST)
            self.num_spilled[group] += len(targets)
            self._leave_device(group, digests[group])

    def _leave_device(self, group: int, digests: Sequence[bytes]) -> None:
        """Unpin the device's blocks under these digests; those that no other node pins leave the device's index."""
        pool, found = self._pools[group], self._on_device[group]
        self._registry.unpin(group, digests)
        blocks = [found[digest] for digest in digests]
        self._registry.forget(group, [block for block in blocks if block in pool.evictable])
        self._registry.withdraw(group, [block for block in blocks if pool.refs[block] and not pool.pins[block]])


def _piece(layout: ArenaLayout) -> int:
    """Return how many hash blocks of a segment are demoted at once: 1/32 of those that the device has room for, within bounds."""
    kept = [group for group in layout.groups if group.spec.keeps_everything]
    block_size = min(group.spec.block_size for group in layout.groups)
    hash_block_bytes = sum(group.stride_bytes * block_size // group.spec.block_size for group in kept)
    if not hash_block_bytes:
        return MOST_IN_PIECE
    return max(LEAST_IN_PIECE, min(MOST_IN_PIECE, layout.pool_bytes // hash_block_bytes // PIECES_ON_DEVICE))

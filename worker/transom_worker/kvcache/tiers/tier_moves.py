"""`TierMoves`: moves nodes of the prefix tree between the device and the host tier, with the blocks that they pin.

    node       a boundary of the prefix tree (`prefix.tree`), at which requests may continue
    segment    the hash blocks between a node's parent and the node; the node pins their blocks in groups that keep every token
    windows    the blocks that sliding groups need at the node's boundary; the node pins all of them or none
    demote     move a node's blocks from the device to the host: copies are queued, and the index changes at once
    promote    let a node in the host tier pin blocks on the device instead of those in the host. The device has them again because
               a load brought them or a sequence computed them
    piece      the most hash blocks of a segment that are demoted at once. The caller splits a longer segment: only its last piece
               is demoted, and the rest becomes a node above. A demotion may free more memory than is needed, and that memory stays
               empty for a while, so a piece is a small part of the device's memory
    leftover   a host block in the index that nothing needs (`host_tier`)

All blocks of a segment are in one tier. A window block may be in both, if checkpoints of both tiers need it. If a running sequence
still references a demoted block, the block stays on the device until the sequence is released, but searches do not find it there.
"""

from collections.abc import Iterable, Sequence

from transom_core.kv_cache.layout import ArenaLayout
from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_worker.kvcache.blocks.block_copies import CopyQueue
from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.prefix.tree import Node, PrefixTree
from transom_worker.kvcache.tiers.host_tier import HostTier

MOST_IN_PIECE = 256  # hash blocks
LEAST_IN_PIECE = 16  # hash blocks, even in small pools: each piece that is split off is one more node of the tree
PIECES_ON_DEVICE = 32  # a piece is at most this part of the pool, unless that is less than `LEAST_IN_PIECE`


class TierMoves:
    """Moves nodes of `tree` between the device, whose blocks `registry` has, and `host`."""

    def __init__(self, tree: PrefixTree, registry: BlockRegistry, host: HostTier, copies: CopyQueue) -> None:
        self.host = host
        self.piece = _piece(registry.layout)  # in hash blocks
        self.num_spilled = [0] * len(registry.pools)  # blocks by group, since start
        self._tree = tree
        self._on_device = registry.index.groups
        self._registry = registry
        self._pools = registry.pools
        self._copies = copies

    def needs(self, node: Node, *, with_segment: bool) -> list[int]:
        """Return, by group, how many host blocks a node's windows take at most; `with_segment` adds the last piece of its segment.

        Fewer are taken if the host has some of the blocks already.
        """
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
        """Move a node's windows to the host, and with `with_segment` its segment too.

        The host must have room for `needs`. The segment must not be longer than a piece; the caller has split it.
        """
        digests: list[list[bytes]] = [[] for _ in self._pools]
        if with_segment:
            for group, of_segment in node.segment_blocks():
                digests[group].extend(of_segment)
        if node.windows_tier == DEVICE:
            for group, of_windows in node.window_blocks():
                # Farthest from the root first, as `segment_blocks` lists them.
                digests[group].extend(reversed(of_windows))
        self._spill(digests)
        if with_segment:
            self._tree.set_tier(node, HOST)
        node.windows_tier = HOST

    def promote(self, node: Node) -> list[Node]:
        """Promote a node and its ancestors, as far as the device has all their blocks; return the nodes that changed."""
        if node.parent is None:  # the node was dropped
            return []
        # Collect the nodes from this one up to the first ancestor on the device. They are promoted in the reverse order, so that
        # along a chain the segments on the device always come first.
        path = []
        above: Node | None = node
        while above is not None and above.tier == HOST:
            path.append(above)
            above = above.parent
        changed = []
        for each in reversed(path):
            if not self._has_all(each.segment_blocks()):
                break
            # Twice, since the digests are iterators, which one pass uses up.
            for group, digests in each.segment_blocks():
                self._registry.pin(group, digests)
            for group, digests in each.segment_blocks():
                self.host.unpin(group, digests)
            self._tree.set_tier(each, DEVICE)
            self._promote_windows(each)
            changed.append(each)
        # A node whose segment was on the device before may have had its windows in the host.
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
        """Move the device's blocks under `digests[group]`, which one node pins, to the host.

        The digests of a segment or window are listed from the farthest block to the nearest to the root, as blocks are unpinned.
        """
        host = self.host
        new = []
        for group, of_group in enumerate(digests):
            found = host.blocks[group]
            # `has_room` counts leftovers as free memory. So a leftover with one of these digests is dropped and copied again, while
            # a host block that something needs gets one more need and is not copied.
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
        """Unpin the device's blocks under these digests; those that no other node pins leave the device's index.

        Of these, blocks without references are freed; the others are freed when running sequences release them.
        """
        pool, found = self._pools[group], self._on_device[group]
        self._registry.unpin(group, digests)
        blocks = [found[digest] for digest in digests]
        self._registry.forget(group, [block for block in blocks if block in pool.evictable])
        self._registry.withdraw(group, [block for block in blocks if pool.refs[block] and not pool.pins[block]])


def _piece(layout: ArenaLayout) -> int:
    """Return the most hash blocks of a segment that are demoted at once.

    That is 1/32 of the hash blocks for which the device has room, but at least `LEAST_IN_PIECE` and at most `MOST_IN_PIECE`. Only
    groups that keep every token count, since a segment's other blocks are few sink blocks.
    """
    kept = [group for group in layout.groups if group.spec.keeps_everything]
    block_size = min(group.spec.block_size for group in layout.groups)
    hash_block_bytes = sum(group.stride_bytes * block_size // group.spec.block_size for group in kept)
    if not hash_block_bytes:
        return MOST_IN_PIECE
    return max(LEAST_IN_PIECE, min(MOST_IN_PIECE, layout.pool_bytes // hash_block_bytes // PIECES_ON_DEVICE))

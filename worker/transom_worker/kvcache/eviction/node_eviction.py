"""`NodeEviction`: chooses which nodes of the prefix tree leave the device or the host tier when memory is needed.

    node       a boundary of the prefix tree (`prefix.tree`); it pins its *segment* (the hash blocks since its parent) and its
               *windows* (the blocks that sliding groups need at the boundary)
    rank       the eviction policy's score of a node; of the compared nodes, the lowest is evicted (`eviction_policy`)
    frontier   the nodes whose segments may leave the device: those that are neither locked nor have a held child (a child is
               *held* if it or a descendant is on the device or locked). Without a host tier these are the leaves
    demote     move to the host tier
    drop       remove from the cache; if there is a disk tier, the blocks go there

The two tiers together are one cache, ordered by rank. The device demotes the lowest node of its frontier, or only the windows of a
node nearer to the root. If the node does not fit into the host tier, lower-ranked nodes there are dropped, or else the node itself.
Example: the device must free memory, its lowest node has rank 3, and the host tier is full; the lowest leaf there has rank 5. Then
the device's node is dropped. If its rank were 7, the host's leaf would be dropped instead, and the node would be moved there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_core.kv_cache.window_repair import repair_start
from transom_worker.kvcache.eviction.eviction_policy import Candidates, EvictionPolicy
from transom_worker.kvcache.prefix.tree import Node, PrefixTree
from transom_worker.kvcache.stats import CheckpointStats
from transom_worker.kvcache.tiers.disk.index import DiskStores
from transom_worker.kvcache.tiers.tier_moves import TierMoves


class Part(Enum):
    """Which part of a node is evicted: only its windows, or its segment with its windows."""

    WINDOWS = auto()
    SEGMENT = auto()


class Victim(NamedTuple):
    """The part of a node that is to be evicted, and the node's rank."""

    node: Node
    part: Part
    rank: float


class EvictionCosts:
    """Estimates the tokens that evicting a part of the prefix cache loses and the bytes that it frees.

    If windows are evicted while the full groups keep their blocks, a window repair can compute the windows again from a position a
    little before the boundary, so fewer tokens are lost. `stride_bytes` are a block's bytes by group; `repair`: window repairs are
    allowed.
    """

    def __init__(self, stride_bytes: Sequence[int], *, block_size: int, repair: bool) -> None:
        self._stride_bytes = stride_bytes
        self._block_size = block_size
        self._repair = repair

    def of_leaf(self, node: Node) -> tuple[int, int]:
        """Return the tokens lost and the bytes freed if a leaf is evicted.

        Lost are the tokens since the nearest checkpoint before it, from which a request would continue then. A leaf without windows
        saves only those that a window repair at its boundary does not compute.
        """
        lost = (node.boundary - node.checkpoint_below().boundary) * self._block_size
        if node.windows is None:
            lost = max(0, lost - self._repair_tokens(node))
        hash_block_bytes = sum(self._stride_bytes[group] // count for group, count in node.retentions.full_groups)
        return lost, len(node.segment) * hash_block_bytes + self._window_bytes(node)

    def of_windows(self, node: Node) -> tuple[int, int]:
        """Return the tokens lost and the bytes freed if a node's windows are evicted and its segment stays."""
        lost = (node.boundary - node.checkpoint_below().boundary) * self._block_size
        lost = min(lost, self._repair_tokens(node))
        return lost, self._window_bytes(node)

    def _window_bytes(self, node: Node) -> int:
        """Return the bytes of a node's windows, without blocks that the checkpoint before it pins too: these would not be freed."""
        if node.windows is None:
            return 0
        below = node.checkpoint_below().boundary
        return sum(
            min(len(digests), node.boundary - below) * self._stride_bytes[group]
            for group, digests in node.window_blocks()
        )

    def _repair_tokens(self, node: Node) -> int:
        """Return how many tokens a window repair computes at a node's boundary; all tokens before it if no repair is possible."""
        n = node.boundary * self._block_size
        can_repair = self._repair and node.retentions.full_groups
        return n - repair_start(node.retentions.specs, n) if can_repair else n


@dataclass(slots=True, eq=False)
class NodeEviction:
    """Evicts nodes of `tree`; `moves` brings them to the host tier, and `stores` to the disk tier."""

    tree: PrefixTree
    moves: TierMoves
    stores: DiskStores
    policy: EvictionPolicy
    costs: EvictionCosts
    counts: CheckpointStats
    # By tier: nodes with a segment or windows there.
    candidates: tuple[Candidates, ...] = field(default_factory=lambda: (Candidates(DEVICE), Candidates(HOST)))

    def add(self, node: Node) -> None:
        """Add a node to the candidates of its tiers, and remove it from the others; call this whenever a node's tiers change.

        A checkpoint that was in neither list is new, and is counted as placed.
        """
        if node.candidate_indices == [None, None] and node.windows is not None:
            self.counts.placed[node.kind.value] += 1
        on_device, in_host = self.candidates
        if node.tier == DEVICE:
            on_device.add(node)
        else:
            on_device.discard(node)
        if node.tier == HOST or (node.windows and node.windows_tier == HOST):
            in_host.add(node)
        else:
            in_host.discard(node)

    def tidy(self, node: Node) -> None:
        """Merge a node into its only child if the node is not needed any more (`PrefixTree.merge`)."""
        if self.tree.merge(node):
            self._discard(node)

    def evict_one(self) -> bool:
        """Demote or drop the lowest-ranked node on the device, or its windows; return False if nothing is left there.

        A sample of the nodes is compared; all nodes are, if no part of the sample can be evicted. A dropped node's blocks lose only
        their pins: searches still find them until they are allocated to another sequence.
        """
        victim = self._lowest(DEVICE)
        if victim is None:
            # Two kinds of nodes are left. Locked nodes pin copies of blocks that running sequences computed themselves. The others
            # are ancestors of nodes in the host tier that are locked because an import adds blocks to their prefix.
            node = next((node for node in self.candidates[DEVICE].all() if not _has_child_on_device(node)), None)
            if node is None:
                return False
            part = Part.WINDOWS if node.windows and node.windows_tier == DEVICE else Part.SEGMENT
            if node.locks or part is Part.WINDOWS or not self._demote(Victim(node, part, math.inf)):
                self._drop(node, part)
        elif not self._demote(victim):
            self._drop(victim.node, victim.part)
        return True

    def make_room(self, num_blocks: Callable[[], Sequence[int]], *, rank: float | None = None) -> bool:
        """Drop nodes from the host tier until `num_blocks()` more blocks of each group fit; return whether they do.

        Only nodes whose rank is below `rank` are dropped; None: any node. `num_blocks` is called again after each dropped node: its
        sibling may then merge with their parent. If the sibling is the node to be moved, it is longer then and needs more blocks.
        """
        host = self.moves.host
        while not host.has_room(num_blocks()):
            victim = self._lowest(HOST)
            if victim is None or (rank is not None and victim.rank >= rank):
                return False
            self._drop(victim.node, victim.part)
        return True

    def best_first(self) -> list[Node]:
        """Return all nodes, those with the highest ranks first, but each node after its ancestors."""
        ranked = sorted(self.tree.nodes(), key=lambda node: self.policy.rank(node, *self.costs.of_leaf(node)))
        ordered: dict[int, Node] = {}  # by id()
        for node in reversed(ranked):
            path, above = [], node
            while above.parent is not None and id(above) not in ordered:
                path.append(above)
                above = above.parent
            ordered.update((id(one), one) for one in reversed(path))
        return list(ordered.values())

    def drop_all(self) -> None:
        """Drop every node of both tiers, locked ones too."""
        for node in reversed(list(self.tree.nodes())):
            self._remove(node)

    def _demote(self, victim: Victim) -> bool:
        """Move a victim to the host tier. Return False if there is no host tier, or if it would have to replace nodes that do not
        rank below the victim."""
        moves, node = self.moves, victim.node
        if not moves.host.exists:
            return False
        with_segment = victim.part is Part.SEGMENT
        # A node with children in the host tier cannot be dropped without them, so it is moved at the cost of any other node.
        rank = None if with_segment and node.children else victim.rank
        if not self.make_room(lambda: moves.needs(node, with_segment=with_segment), rank=rank):
            return False
        if with_segment and len(node.segment) > moves.piece:
            self.add(self.tree.split_off(node, moves.piece))
        moves.demote(node, with_segment=with_segment)
        self.add(node)
        self.tidy(node)
        return True

    def _drop(self, node: Node, part: Part) -> None:
        """Remove a node and its descendants from the cache; or remove only the node's windows.

        The descendants, if any, are in the host tier. They are removed first: only a leaf can be removed.
        """
        if part is Part.WINDOWS:
            self.stores.store(node, with_segment=False)
            self._remove_windows(node)
            self.tidy(node)
            return
        parent = node.parent
        for each in reversed([node, *self.tree.nodes(node)]):
            self.stores.store(each, with_segment=True)
            self._remove(each)
        if parent is not None:
            self.tidy(parent)

    def _remove(self, node: Node) -> None:
        """Remove a leaf from the tree, tell the policy, and count it."""
        self.policy.removed(node)
        if node.windows is not None:  # a node without windows was not a checkpoint
            self.counts.evicted[node.kind.value] += 1
        self._discard(node)
        self.tree.drop_leaf(node)

    def _remove_windows(self, node: Node) -> None:
        self.policy.windows_evicted(node)
        self.counts.windows_evicted[node.kind.value] += 1
        self.tree.unpin_windows(node)
        self.add(node)

    def _discard(self, node: Node) -> None:
        """Remove a node from the candidates of both tiers."""
        for candidates in self.candidates:
            candidates.discard(node)

    def _lowest(self, tier: int) -> Victim | None:
        """Return the part with the lowest rank among those that can leave a tier, from a sample if possible; None if none can."""
        candidates = self.candidates[tier]
        return self._lowest_of(candidates.sample(), tier) or self._lowest_of(candidates.all(), tier)

    def _lowest_of(self, nodes: Sequence[Node], tier: int) -> Victim | None:
        best = None
        for node in nodes:
            part = _evictable_part(node, tier)
            if part is None:
                continue
            cost = self.costs.of_leaf(node) if part is Part.SEGMENT else self.costs.of_windows(node)
            rank = self.policy.rank(node, *cost)
            if best is None or rank < best.rank:
                best = Victim(node, part, rank)
        return best


def _has_child_on_device(node: Node) -> bool:
    return any(child.tier == DEVICE for child in node.children)


def _evictable_part(node: Node, tier: int) -> Part | None:
    """Return the part of a node that can leave a tier; None if none can.

    A segment leaves the device before those above it, so the node must have no held child; it leaves the host tier only as a leaf.
    """
    may_leave = not (node.locks or (node.num_held_children if tier == DEVICE else node.children))
    if may_leave and node.tier == tier:
        return Part.SEGMENT
    if node.windows and node.windows_tier == tier and (tier == DEVICE or not node.locks):
        return Part.WINDOWS
    return None

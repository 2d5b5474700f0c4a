"""`PrefixTree`: the prefixes that the cache keeps deliberately, as a tree, and the blocks that each node pins.

    hash block   `--block-size` tokens with a digest of them and all tokens before; a *chain* is the list of a prompt's digests
    node         a *boundary* (a number of hash blocks) of a chain, at which later requests are expected to continue
    pin          exclude a block from eviction
    segment      the hash blocks between the boundaries of a node's parent and of the node. The node pins their blocks in the full
                 groups (which keep every token), and those that are sink blocks in the sliding groups
    windows      the blocks that sliding groups need at the node's boundary; a node pins all of them or none
    checkpoint   a node with windows (or without sliding groups): a request continues there without computing any token again
    owner        the node whose segment has a given hash block
    tier         where a node's blocks are: on the device or in the host tier; its segment and its windows each have a tier
    held         said of a node that is on the device, has a lock or has a held child: the segments above must not leave the device

Three requests share a system prompt of 16 hash blocks. The boundaries of the tree's nodes are:

    root 0 ---- system 16 ---- prompt 44 ---- generation 46
                        \\
                         ------ prompt 20

Segments are evicted from the leaves, so the cached hash blocks of a chain are always its first ones. Segments move to the host tier
in the same order: along a chain, those on the device come first, then those in the host tier. A node whose segment is on the device
may have its windows in the host tier, but never the other way round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from transom_core.kv_cache.retention_set import RetentionSet
from transom_core.kv_cache.tiers import DEVICE


class Pins(Protocol):
    """Pins blocks of one tier: a block with pins is not evicted."""

    def pin(self, group: int, digests: Iterable[bytes]) -> None:
        """Add a pin to each of the group's blocks under these digests."""

    def unpin(self, group: int, digests: Iterable[bytes]) -> None:
        """Remove a pin from each of them."""


class CheckpointKind(StrEnum):
    """Why a checkpoint was placed."""

    SYSTEM = "system"  # at the end of a conversation's system part
    TURN = "turn"  # at the end of a turn of a conversation
    PROMPT = "prompt"  # at the end of a prompt
    GENERATION = "generation"  # at the end of an answer
    FORK = "fork"  # where two chains part
    PREEMPTED = "preempted"  # where a preempted sequence stood


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A boundary of a chain, with the digests of the blocks that it pins.

    `windows` has a list of digests per sliding group; None if no windows are pinned. `retentions` say what sequences with this
    chain keep in each group; a KV policy is part of the digests, so all nodes of a chain have the same.
    """

    boundary: int  # hash blocks
    digest: bytes  # of the last hash block before the boundary
    parent: Node | None
    kind: CheckpointKind
    retentions: RetentionSet
    children: dict[Node, None] = field(default_factory=dict)  # in order of arrival
    segment: list[bytes] = field(default_factory=list)  # digests of hash blocks [parent.boundary, boundary)
    windows: tuple[list[bytes], ...] | None = None
    tier: int = DEVICE  # of the segment
    windows_tier: int = DEVICE
    num_held_children: int = 0
    # Running sequences whose last node this is, at their start or passed since; a locked node is not evicted.
    locks: int = 0
    num_returns: int = 0  # requests of the node's conversation that continued from an earlier checkpoint
    # By tier: the node's place in `eviction_policy.Candidates`, if it is there.
    candidate_indices: list[int | None] = field(default_factory=lambda: [None, None])
    policy_state: object = None  # what the eviction policy remembers of the node

    @property
    def is_held(self) -> bool:
        """Whether the segments above must not leave the device: this one is on the device, or this node or a descendant is
        locked."""
        return self.tier == DEVICE or self.locks > 0 or self.num_held_children > 0

    def segment_blocks(self) -> Iterator[tuple[int, Iterable[bytes]]]:
        """Yield (group, digests) of the blocks that the segment pins, those farthest from the root first.

        They are unpinned in this order, and blocks that became evictable first are evicted first.
        """
        begin = self.boundary - len(self.segment)
        for group, hash_blocks_per_block in self.retentions.full_groups:
            # Index in the segment of its first hash block that is the last one of a block, since a block is found under its last
            # hash block. Example: blocks of 4 hash blocks end at the chain's indices 3, 7, 11 ...; if `begin` is 6, the first is 1.
            first = (-begin - 1) % hash_blocks_per_block
            yield group, reversed(self.segment[first::hash_blocks_per_block])
        for group, num_sink_blocks in self.retentions.sliding_groups:
            if begin < num_sink_blocks:
                yield group, reversed(self.segment[: num_sink_blocks - begin])

    def window_blocks(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield (group, digests) of the windows, if the node has any."""
        for (group, _), digests in zip(self.retentions.sliding_groups, self.windows or (), strict=False):
            yield group, digests

    def checkpoint_below(self) -> Node:
        """Return the nearest ancestor that is a checkpoint, or the root; "below" means before this node in the chain."""
        node = self.parent
        assert node is not None
        while node.windows is None and node.parent is not None:
            node = node.parent
        return node


class PrefixTree:
    """Adds, splits, merges and removes nodes, and pins and unpins their blocks. Not thread-safe.

    `retentions` are those of sequences without a KV policy; `pins[tier]` pins the blocks of a tier.
    """

    def __init__(self, retentions: RetentionSet, pins: Sequence[Pins]) -> None:
        self.root = Node(0, b"", None, CheckpointKind.SYSTEM, retentions)
        self.owner: dict[bytes, Node] = {}  # by digest of a hash block
        self._pins = pins

    def nodes(self, below: Node | None = None) -> Iterator[Node]:
        """Yield all nodes below this one (None: below the root), parents before their children."""
        stack = list((below or self.root).children)
        while stack:
            node = stack.pop()
            yield node
            stack += node.children

    def reach(self, chain: Sequence[bytes], limit: int) -> int:
        """Return how many of the chain's first `limit` hash blocks have an owner; these are always the first ones."""
        owner = self.owner
        if limit and chain[limit - 1] in owner:  # often, and cheaper than the search
            return limit
        return bisect_left(chain, True, hi=limit, key=lambda digest: digest not in owner)

    def reach_on_device(self, chain: Sequence[bytes], limit: int) -> int:
        """Return how many of the chain's first `limit` hash blocks have an owner on the device; these are always the first ones,
        too."""
        reach = self.reach(chain, limit)
        node: Node | None = self.owner[chain[reach - 1]] if reach else self.root
        while node is not None and node.tier != DEVICE:
            node = node.parent
        assert node is not None  # the root is on the device
        return min(reach, node.boundary)

    def node_at(self, chain: Sequence[bytes], boundary: int) -> Node:
        """Return the node at a boundary; if the boundary is inside a segment, split the segment there. All hash blocks before the
        boundary must have owners."""
        if not boundary:
            return self.root
        lower = self.owner[chain[boundary - 1]]
        return lower if lower.boundary == boundary else self._split(lower, boundary, chain[boundary - 1])

    def lock(self, node: Node) -> None:
        """Add one lock to a node."""
        was_held = node.is_held
        node.locks += 1
        if not was_held and node.parent is not None:
            self._count_held(node.parent, 1)

    def unlock(self, node: Node) -> None:
        """Remove one lock from a node."""
        node.locks -= 1
        if not node.is_held and node.parent is not None:
            self._count_held(node.parent, -1)

    def insert(
        self, chain: Sequence[bytes], boundary: int, kind: CheckpointKind, retentions: RetentionSet
    ) -> tuple[Node, bool]:
        """Return the node at a boundary of a chain, and whether it was added as a new leaf.

        The device must have the blocks of its segment and of all segments above.
        """
        reach = self.reach(chain, boundary)
        parent = self.node_at(chain, reach)
        if reach == boundary:
            return parent, False
        node = Node(boundary, chain[boundary - 1], parent, kind, retentions)
        node.segment = list(chain[reach:boundary])
        node.windows = None if retentions.slides else ()  # without sliding groups it is a checkpoint at once
        parent.children[node] = None
        for digest in node.segment:
            self.owner[digest] = node
        for group, digests in node.segment_blocks():
            self._pins[DEVICE].pin(group, digests)
        self._count_held(parent, 1)
        return node, True

    def set_tier(self, node: Node, tier: int) -> None:
        """Note that a node's segment is in another tier from now on; the caller moves the blocks and their pins."""
        was_held = node.is_held
        node.tier = tier
        if node.parent is not None and node.is_held != was_held:
            self._count_held(node.parent, 1 if node.is_held else -1)

    def pin_windows(self, node: Node, windows: tuple[list[bytes], ...]) -> None:
        """Give a node its windows, and pin their blocks on the device, which must have them."""
        node.windows, node.windows_tier = windows, DEVICE
        for group, digests in node.window_blocks():
            self._pins[DEVICE].pin(group, digests)

    def unpin_windows(self, node: Node) -> None:
        """Unpin a node's windows, if it has any."""
        for group, digests in node.window_blocks():
            self._pins[node.windows_tier].unpin(group, digests)
        node.windows = None

    def drop_leaf(self, node: Node) -> None:
        """Remove a node without children and unpin its blocks, those farthest from the root first."""
        assert not node.children
        assert node.parent is not None
        self.unpin_windows(node)
        for group, digests in node.segment_blocks():
            self._pins[node.tier].unpin(group, digests)
        for digest in node.segment:
            del self.owner[digest]
        if node.is_held:
            self._count_held(node.parent, -1)
        del node.parent.children[node]
        node.parent = None

    def merge(self, node: Node) -> bool:
        """Merge a node into its only child, in the same tier, if the node is not needed: it has no windows and no lock. Return
        whether it was merged."""
        if node.windows is not None or node.locks or len(node.children) != 1 or node.parent is None:
            return False
        (child,) = node.children
        if child.tier != node.tier:
            return False
        child.segment = node.segment + child.segment
        child.parent = node.parent
        del node.parent.children[node]
        node.parent.children[child] = None
        for digest in node.segment:
            self.owner[digest] = child
        return True

    def _split(self, lower: Node, boundary: int, digest: bytes) -> Node:
        """Split a segment at a boundary: a new node takes the part near the root, `lower` keeps the rest. Return the new node."""
        above = lower.parent
        assert above is not None
        upper = Node(boundary, digest, above, CheckpointKind.FORK, lower.retentions)
        num_upper = boundary - above.boundary
        upper.segment, lower.segment = lower.segment[:num_upper], lower.segment[num_upper:]
        upper.windows = None if upper.retentions.slides else ()
        upper.num_returns = lower.num_returns + 1  # the chain that parts here shares it
        upper.tier = upper.windows_tier = lower.tier
        upper.num_held_children = int(lower.is_held)
        for moved in upper.segment:
            self.owner[moved] = upper
        del above.children[lower]
        above.children[upper] = None
        upper.children[lower] = None
        lower.parent = upper
        return upper

    def split_off(self, lower: Node, num_blocks: int) -> Node:
        """Split a segment so that `lower` keeps only its last `num_blocks` hash blocks, and return the new node above.

        No request's chain parts at this boundary, so both nodes keep what the eviction policy knew about the whole segment.
        """
        boundary = lower.boundary - num_blocks
        upper = self._split(lower, boundary, lower.segment[-num_blocks - 1])
        upper.num_returns, upper.policy_state = lower.num_returns, lower.policy_state
        return upper

    def _count_held(self, node: Node | None, change: int) -> None:
        """Change a node's number of held children by `change`. If that changes whether the node is held, do the same to its parent,
        and so on."""
        while node is not None:
            was_held = node.is_held
            node.num_held_children += change
            if node.is_held == was_held:
                return
            node = node.parent

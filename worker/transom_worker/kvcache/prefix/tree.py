"""`PrefixTree`: the prefixes that the cache keeps deliberately, as a tree, and the blocks that each node pins.

    segment      the hash blocks between a node's boundary and its parent's; the node pins their blocks in the full groups, and the
                 sink blocks of sliding groups
    windows      the blocks that sliding groups need at the node's boundary; a node pins all of them or none
    owner        the node whose segment has a hash block
    tier         where a node's blocks are: on the device or in the host tier; its segment and its windows each have one
    held         said of a node that is on the device, has a lock or has a held child: the nodes above it must stay where they are

Three requests share a system prompt of 16 hash blocks; two conversations follow it:

    root 0 ---- system 16 ---- prompt 44 ---- generation 46
                        \\
                         ------ prompt 20

Segments are evicted from the leaves, so the cached hash blocks of a chain are always its first ones. They go to the host tier in
the same order: along a chain, segments on the device come first, then those in the host tier. A node on the device may have its
windows in the host tier, but never the other way round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Protocol

from transom_core.kv_cache.retention_set import RetentionSet
from transom_core.kv_cache.tiers import DEVICE


class Pins(Protocol):
    """Keeps blocks of one tier from being evicted."""

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


class Node:
    """A boundary of a chain, with what it pins. `windows` has a list of digests per sliding group; None if no windows are
    pinned. `retentions` are those of the sequences with this chain: all nodes of a chain have the same.
    """

    __slots__ = (
        "boundary",
        "candidate_indices",
        "children",
        "digest",
        "kind",
        "locks",
        "num_held_children",
        "num_returns",
        "parent",
        "policy_state",
        "retentions",
        "segment",
        "tier",
        "windows",
        "windows_tier",
    )

    def __init__(
        self, boundary: int, digest: bytes, parent: Node | None, kind: CheckpointKind, retentions: RetentionSet
    ) -> None:
        self.boundary = boundary  # hash blocks
        self.digest = digest  # of the last hash block before the boundary
        self.parent = parent
        self.kind = kind
        self.retentions = retentions
        self.children: dict[Node, None] = {}  # in order of arrival
        self.segment: list[bytes] = []  # digests of hash blocks [parent.boundary, boundary)
        self.windows: tuple[list[bytes], ...] | None = None
        self.tier = DEVICE  # of the segment
        self.windows_tier = DEVICE
        self.num_held_children = 0
        self.locks = 0  # running sequences that started here or passed here last; a locked node is not evicted
        self.num_returns = 0  # requests of the node's conversation that continued from an earlier checkpoint
        # By tier: the node's place in `eviction_policy.Candidates`, if it is there.
        self.candidate_indices: list[int | None] = [None, None]
        self.policy_state: object = None  # what the eviction policy remembers of the node

    @property
    def is_held(self) -> bool:
        """Whether the segments above must stay where they are: this one is on the device, or a lock is here or below."""
        return self.tier == DEVICE or self.locks > 0 or self.num_held_children > 0

    def segment_blocks(self) -> Iterator[tuple[int, Iterable[bytes]]]:
        """Yield (group, digests) of the blocks that the segment pins, those farthest from the root first."""
        begin = self.boundary - len(self.segment)
        for group, hash_blocks_per_block in self.retentions.full_groups:
            # The segment's first hash block that ends a block of the group: such a block is found under its last hash block.
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
        """Return the nearest ancestor that has windows, or the root."""
        node = self.parent
        assert node is not None
        while node.windows is None and node.parent is not None:
            node = node.parent
        return node


class PrefixTree:
    """Pins and unpins blocks as nodes come and go. Not thread-safe.

    `retentions` are those of sequences without a KV policy of their own; `pins` are by tier.
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
        if limit and chain[limit - 1] in owner:
            return limit
        return bisect_left(chain, True, hi=limit, key=lambda digest: digest not in owner)

    def reach_on_device(self, chain: Sequence[bytes], limit: int) -> int:
        """Return how many of the chain's first `limit` hash blocks have an owner on the device; these, too, are always the first
        ones."""
        reach = self.reach(chain, limit)
        node: Node | None = self.owner[chain[reach - 1]] if reach else self.root
        while node is not None and node.tier != DEVICE:
            node = node.parent
        assert node is not None  # the root is on the device
        return min(reach, node.boundary)

    def node_at(self, chain: Sequence[bytes], boundary: int) -> Node:
        """Return the node at a boundary; split the segment that contains it if necessary. The hash blocks before it must have
        owners."""
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
        """Return the node at a boundary of a chain, and whether it is new. The device must have its segment's blocks, and those of
        all segments above.
        """
        reach = self.reach(chain, boundary)
        parent = self.node_at(chain, reach)
        if reach == boundary:
            return parent, False
        node = Node(boundary, chain[boundary - 1], parent, kind, retentions)
        node.segment = list(chain[reach:boundary])
        node.windows = None if retentions.slides else ()
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
        """Pin a node's windows on the device, which must have the blocks."""
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
        """Merge a node into its only child if nothing needs the node (it has no windows and no lock); return whether it was
        merged."""
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

        No chain parts there, so the eviction policy gives both parts the rank that the whole had.
        """
        boundary = lower.boundary - num_blocks
        upper = self._split(lower, boundary, lower.segment[-num_blocks - 1])
        upper.num_returns, upper.policy_state = lower.num_returns, lower.policy_state
        return upper

    def _count_held(self, node: Node | None, change: int) -> None:
        """Change a node's number of held children, and go on to its ancestors for as long as that changes whether a node is
        held."""
        while node is not None:
            was_held = node.is_held
            node.num_held_children += change
            if node.is_held == was_held:
                return
            node = node.parent

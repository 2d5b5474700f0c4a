"""The cache as a tree of prefixes: where requests may come back, and which blocks each such place counts on.

A node stands at a boundary of a chain. It holds two kinds of blocks: its *segment*, the units between its parent's boundary and its
own in the groups that keep everything, and its *windows*, what the sliding groups need there (`live` at that boundary). Windows
are all there or given up: a checkpoint is atomic. Segments go from the leaves, so a chain never loses its middle.

    root 0 ---- system 256 ---- prompt 700 ---- generation 730
                     \\--------- prompt 310 ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum

PinBlocks = Callable[[int, Iterable[bytes]], None]  # (group, digests)


class CheckpointKind(StrEnum):
    """Why a checkpoint was placed."""

    SYSTEM = "system"  # the end of a conversation's system part
    TURN = "turn"
    PROMPT = "prompt"
    GENERATION = "generation"
    FORK = "fork"  # chains were seen to part here
    PREEMPTED = "preempted"


class Node:
    """A place in the tree. `windows` are the digests held by sliding group, None where they are not held."""

    __slots__ = (
        "boundary",
        "children",
        "digest",
        "kind",
        "locks",
        "memo",
        "parent",
        "slot",
        "turns",
        "units",
        "windows",
    )

    def __init__(self, boundary: int, digest: bytes, parent: Node | None, kind: CheckpointKind) -> None:
        self.boundary = boundary  # units
        self.digest = digest
        self.parent = parent
        self.kind = kind
        self.children: dict[Node, None] = {}  # in order of arrival
        self.units: list[bytes] = []  # digests of (parent.boundary, boundary]
        self.windows: tuple[list[bytes], ...] | None = None
        self.locks = 0  # running sequences that build on it
        self.turns = 0  # how often its conversation has come back
        self.slot = -1  # in the list of candidates
        self.memo: object = None  # the eviction policy's

    def checkpoint_below(self) -> Node:
        """The nearest ancestor with windows, or the root."""
        node = self.parent
        assert node is not None
        while node.windows is None and node.parent is not None:
            node = node.parent
        return node


class PrefixTree:
    """Holds and lets go blocks as nodes come and go. Not thread-safe.

    `full_groups` are (group, units per block) of the groups that keep everything, `sliding_groups` (group, pinned blocks) the
    others: pinned blocks, which pin sink tokens, belong to segments.
    """

    def __init__(
        self,
        full_groups: Sequence[tuple[int, int]],
        sliding_groups: Sequence[tuple[int, int]],
        *,
        pin: PinBlocks,
        unpin: PinBlocks,
    ) -> None:
        self.root = Node(0, b"", None, CheckpointKind.SYSTEM)
        self.owner: dict[bytes, Node] = {}  # unit's digest -> the node whose segment has it
        self._full_groups = full_groups
        self._sliding_groups = sliding_groups
        self._pin = pin
        self._unpin = unpin

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children)
        while stack:
            node = stack.pop()
            yield node
            stack += node.children

    def reach(self, chain: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` units the tree owns. The owned ones of a chain are its first ones."""
        owner = self.owner
        if limit and chain[limit - 1] in owner:
            return limit
        low, high = 0, max(0, limit - 1)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in owner:
                low = middle
            else:
                high = middle - 1
        return low

    def node_at(self, chain: Sequence[bytes], boundary: int) -> Node:
        """The node at an owned boundary; cuts the segment that holds it, if need be."""
        if not boundary:
            return self.root
        lower = self.owner[chain[boundary - 1]]
        return lower if lower.boundary == boundary else self._cut(lower, boundary, chain[boundary - 1])

    def insert(self, chain: Sequence[bytes], boundary: int, kind: CheckpointKind) -> tuple[Node, bool]:
        """The node at a boundary of a chain, and whether it is new. Its units' blocks must be in the index."""
        reach = self.reach(chain, boundary)
        parent = self.node_at(chain, reach)
        if reach == boundary:
            return parent, False
        node = Node(boundary, chain[boundary - 1], parent, kind)
        node.units = list(chain[reach:boundary])
        node.windows = None if self._sliding_groups else ()
        parent.children[node] = None
        for digest in node.units:
            self.owner[digest] = node
        self._each_block(node, self._pin)
        return node, True

    def pin_windows(self, node: Node, windows: tuple[list[bytes], ...]) -> None:
        """Count on the sliding groups' blocks, which must be in the index."""
        for (group, _), digests in zip(self._sliding_groups, windows, strict=True):
            self._pin(group, digests)
        node.windows = windows

    def unpin_windows(self, node: Node) -> None:
        """Let the windows go."""
        if node.windows is not None:
            for (group, _), digests in zip(self._sliding_groups, node.windows, strict=True):
                self._unpin(group, digests)
            node.windows = None

    def drop_leaf(self, node: Node) -> None:
        """Take a node without children out, its far end first."""
        assert not node.children
        assert node.parent is not None
        self.unpin_windows(node)
        self._each_block(node, self._unpin)
        for digest in node.units:
            del self.owner[digest]
        del node.parent.children[node]
        node.parent = None

    def merge(self, node: Node) -> bool:
        """Give a node that stands for nothing any more (no windows, no fork, no lock) to its only child; whether it did."""
        if node.windows is not None or node.locks or len(node.children) != 1 or node.parent is None:
            return False
        (child,) = node.children
        child.units = node.units + child.units
        child.parent = node.parent
        del node.parent.children[node]
        node.parent.children[child] = None
        for digest in node.units:
            self.owner[digest] = child
        return True

    def _cut(self, lower: Node, boundary: int, digest: bytes) -> Node:
        """A new node inside a segment: it takes the upper part."""
        above = lower.parent
        assert above is not None
        upper = Node(boundary, digest, above, CheckpointKind.FORK)
        cut = boundary - above.boundary
        upper.units, lower.units = lower.units[:cut], lower.units[cut:]
        upper.windows = None if self._sliding_groups else ()
        upper.turns = lower.turns
        for unit in upper.units:
            self.owner[unit] = upper
        del above.children[lower]
        above.children[upper] = None
        upper.children[lower] = None
        lower.parent = upper
        return upper

    def _each_block(self, node: Node, act: PinBlocks) -> None:
        """`act` on the blocks of the segment, group by group, the far end first."""
        begin = node.boundary - len(node.units)
        for group, units_per_block in self._full_groups:
            first = (-begin - 1) % units_per_block  # the first unit that ends a block
            act(group, reversed(node.units[first::units_per_block]))
        for group, num_sink_blocks in self._sliding_groups:
            if begin < num_sink_blocks:
                act(group, reversed(node.units[: num_sink_blocks - begin]))

"""Which checkpoint goes when memory is needed: the one whose loss costs least per byte that it frees.

Two things can go: a *leaf* of the tree with its segment and windows, or the *windows* alone of a node that was built upon. Blocks
that nobody holds (left behind by windows, or let go here) are taken before any of these and stay findable until then.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from transom_worker.kvcache.return_times import CheckpointClass, ReturnTimes, Watch
from transom_worker.kvcache.tree import CheckpointKind, Node

SAMPLE = 64  # candidates compared for one victim
MAX_GHOSTS = 262_144
GHOST_TAIL = 64  # units at the end of a segment that are all remembered; before them one in 16
MAX_TURNS = 3


class Ghost(NamedTuple):
    """A checkpoint that went, and that a request came back to: how many units before its boundary the request parted."""

    kind: CheckpointKind
    turns: int
    offset_units: int


class EvictionPolicy(Protocol):
    """Learns from what requests come back to, and ranks what could go. One instance serves one cache."""

    def admitted(self) -> None:
        """A request was admitted: the clock of all ages."""

    def created(self, node: Node) -> None:
        """A node stands, with its kind and turns set."""

    def built_upon(self, node: Node) -> None:
        """A node got its first child, or its conversation parted from it."""

    def returned(self, node: Node) -> None:
        """A request came back to this node, or into its segment."""

    def missed(self, chain: Sequence[bytes], begin: int, end: int) -> Ghost | None:
        """A request's units `[begin, end)` are not in the tree; what it came back to, if that was there once."""

    def windows_dropped(self, node: Node) -> None:
        """Its windows went; the node may stay."""

    def removed(self, node: Node) -> None:
        """The node went with its segment."""

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """Smaller goes first. `lost_tokens` must be computed again should a request return."""


class ReturnTimePolicy:
    """Expected tokens saved per byte and request: learned return times (see `return_times`) times tokens over bytes."""

    def __init__(self) -> None:
        self._times = ReturnTimes()
        self._ghosts: OrderedDict[bytes, tuple[Watch, int]] = OrderedDict()  # and the boundary, by a unit before it

    def admitted(self) -> None:
        """See `EvictionPolicy`."""
        self._times.tick()

    def created(self, node: Node) -> None:
        """See `EvictionPolicy`."""
        node.memo = self._times.watch(_class(node, built_upon=False))

    def built_upon(self, node: Node) -> None:
        """See `EvictionPolicy`."""
        self._end(node)
        node.memo = self._times.watch(_class(node, built_upon=True))

    def returned(self, node: Node) -> None:
        """See `EvictionPolicy`."""
        item = node.memo
        if isinstance(item, Watch):
            self._times.returned(item)
            node.memo = self._times.watch(item.cls)

    def missed(self, chain: Sequence[bytes], begin: int, end: int) -> Ghost | None:
        """See `EvictionPolicy`."""
        ghosts = self._ghosts
        for at in range(end - 1, begin - 1, -1):
            item = ghosts.pop(chain[at], None)
            if item is not None:
                watch, boundary = item
                self._times.returned(watch)
                kind, _, turns = watch.cls
                return Ghost(CheckpointKind(kind), turns, boundary - (at + 1))
        return None

    def windows_dropped(self, node: Node) -> None:
        """See `EvictionPolicy`."""
        if isinstance(node.memo, Watch):
            self._remember(node.digest, node, node.memo)

    def removed(self, node: Node) -> None:
        """See `EvictionPolicy`."""
        if not isinstance(node.memo, Watch):
            return
        tail = len(node.units) - GHOST_TAIL
        for at, digest in enumerate(node.units):
            if at >= tail or digest[0] < 16:
                self._remember(digest, node, node.memo)

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """See `EvictionPolicy`."""
        if not isinstance(node.memo, Watch):
            return 0.0
        return self._times.worth(node.memo) * lost_tokens / max(1, freed_bytes)

    def _end(self, node: Node) -> None:
        if isinstance(node.memo, Watch):
            self._times.forget(node.memo)

    def _remember(self, digest: bytes, node: Node, item: Watch) -> None:
        self._ghosts[digest] = (item, node.boundary)
        self._ghosts.move_to_end(digest)
        if len(self._ghosts) > MAX_GHOSTS:
            self._ghosts.popitem(last=False)


class Candidates:
    """The nodes of which something can go; a sample of them is compared for each victim."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._random = random.Random(0)

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node: Node) -> None:
        """Idempotent."""
        if node.slot < 0:
            node.slot = len(self._nodes)
            self._nodes.append(node)

    def discard(self, node: Node) -> None:
        """Idempotent."""
        if node.slot >= 0:
            last = self._nodes.pop()
            if last is not node:
                self._nodes[node.slot] = last
                last.slot = node.slot
            node.slot = -1

    def all(self) -> list[Node]:
        """Every one."""
        return self._nodes

    def sample(self) -> list[Node]:
        """All of them where they are few, else some."""
        nodes = self._nodes
        if len(nodes) <= SAMPLE:
            return nodes
        return [nodes[self._random.randrange(len(nodes))] for _ in range(SAMPLE)]


def _class(node: Node, *, built_upon: bool) -> CheckpointClass:
    return (node.kind.value, built_upon, min(node.turns, MAX_TURNS))

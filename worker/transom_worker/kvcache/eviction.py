"""Decides which part of the prefix cache is evicted when memory is needed: the part that saves least computing per byte that it
holds.

Terms:

    node, segment, windows  parts of the prefix tree (`tree`): a node pins a segment of its chain, and windows at its boundary
    evicting a leaf         frees a childless node's segment and windows
    evicting windows        frees the windows of a node that has children; its segment stays
    rank                    a policy's estimate of a node's value per byte; of the nodes compared the lowest is evicted
    return                  a later request that continues from a node
    ghost                   what is remembered of an evicted hash block, to learn from returns that find it gone

Blocks that no node pins are evicted before any node, so this module never sees them.

Example: leaf A would free 4 MiB and lose 512 tokens, leaf B 1 MiB and 256 tokens. If returns to both are equally likely, A is
evicted: it saves 128 tokens per MiB, B 256. If A is expected to return three times as soon, its worth is three times as high, and B
is evicted.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from transom_worker.kvcache.return_times import CheckpointClass, ReturnTimes, WatchedCheckpoint
from transom_worker.kvcache.tree import CheckpointKind, Node

SAMPLE_SIZE = 64  # candidates compared for one victim
MAX_GHOSTS = 262_144
GHOST_TAIL = 64  # hash blocks at the end of a segment that all become ghosts; of the others 1 in 16 does
MAX_RETURNS = 3  # classes do not tell higher numbers of returns apart


class Ghost(NamedTuple):
    """An evicted node that a request came back to.

    The request's chain parts from the node's chain `num_blocks_before` hash blocks before the node's boundary.
    """

    kind: CheckpointKind
    num_returns: int
    num_blocks_before: int


class EvictionPolicy(Protocol):
    """Learns from returns, and ranks nodes for eviction. One instance serves one cache; it keeps its state in
    `node.policy_state`.
    """

    def admitted(self) -> None:
        """A request was admitted. Policies count time in admitted requests."""

    def created(self, node: Node) -> None:
        """A node was placed; its kind and its number of returns are set."""

    def built_upon(self, node: Node) -> None:
        """A node got its first child, or the first sibling behind a common parent that was split off."""

    def returned(self, node: Node) -> None:
        """A request returned to a node, or into its segment."""

    def missed(self, chain: Sequence[bytes], begin: int, end: int) -> Ghost | None:
        """A request's hash blocks `[begin, end)` are not in the tree. Return the evicted node that it came back to, if one is
        known.
        """

    def windows_evicted(self, node: Node) -> None:
        """A node's windows were evicted; the node may stay."""

    def removed(self, node: Node) -> None:
        """A node was evicted with its segment."""

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """Return the node's rank; the smallest is evicted first.

        Evicting it frees `freed_bytes`, and a request that returns to it must then compute `lost_tokens` tokens again.
        """


class ReturnTimePolicy:
    """Ranks a node by the tokens that it is expected to save per byte: learned worth (`return_times`) times tokens, over bytes."""

    def __init__(self) -> None:
        self._times = ReturnTimes()
        self._ghosts: OrderedDict[bytes, tuple[WatchedCheckpoint, int]] = (
            OrderedDict()
        )  # (evicted node, its boundary) by digest

    def admitted(self) -> None:
        """Advance the clock by one request."""
        self._times.tick()

    def created(self, node: Node) -> None:
        """Watch the node for its first return."""
        node.policy_state = self._times.watch(_class(node, built_upon=False))

    def built_upon(self, node: Node) -> None:
        """Watch the node from now on as one of the class of nodes that were built upon."""
        self._forget(node)
        node.policy_state = self._times.watch(_class(node, built_upon=True))

    def returned(self, node: Node) -> None:
        """Count the return, and watch the node for the next one."""
        watched = node.policy_state
        if isinstance(watched, WatchedCheckpoint):
            self._times.returned(watched)
            node.policy_state = self._times.watch(watched.cls)

    def missed(self, chain: Sequence[bytes], begin: int, end: int) -> Ghost | None:
        """Count a return to the evicted node that shares most of the chain, and return that node's ghost."""
        ghosts = self._ghosts
        for at in range(end - 1, begin - 1, -1):
            found = ghosts.pop(chain[at], None)
            if found is not None:
                watched, boundary = found
                self._times.returned(watched)
                kind, _, num_returns = watched.cls
                return Ghost(CheckpointKind(kind), num_returns, boundary - (at + 1))
        return None

    def windows_evicted(self, node: Node) -> None:
        """Remember the node's boundary as a ghost."""
        if isinstance(node.policy_state, WatchedCheckpoint):
            self._remember(node.digest, node, node.policy_state)

    def removed(self, node: Node) -> None:
        """Remember the segment's last hash blocks, and a sample of the others, as ghosts."""
        if not isinstance(node.policy_state, WatchedCheckpoint):
            return
        tail = len(node.segment) - GHOST_TAIL
        for at, digest in enumerate(node.segment):
            if at >= tail or digest[0] < 16:  # the first byte of a digest is uniform: 16 of 256 values
                self._remember(digest, node, node.policy_state)

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """Return worth times tokens over bytes; 0 for a node that is not watched, such as one made by a split."""
        if not isinstance(node.policy_state, WatchedCheckpoint):
            return 0.0
        return self._times.worth(node.policy_state) * lost_tokens / max(1, freed_bytes)

    def _forget(self, node: Node) -> None:
        if isinstance(node.policy_state, WatchedCheckpoint):
            self._times.forget(node.policy_state)

    def _remember(self, digest: bytes, node: Node, watched: WatchedCheckpoint) -> None:
        self._ghosts[digest] = (watched, node.boundary)
        self._ghosts.move_to_end(digest)
        if len(self._ghosts) > MAX_GHOSTS:
            self._ghosts.popitem(last=False)


class Candidates:
    """The nodes that may be evicted, in a list with constant-time insertion, removal and sampling."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._random = random.Random(0)

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node: Node) -> None:
        """Add a node, unless it is there already."""
        if node.candidate_index is None:
            node.candidate_index = len(self._nodes)
            self._nodes.append(node)

    def discard(self, node: Node) -> None:
        """Remove a node, if it is there; the list's last node takes its place."""
        if node.candidate_index is not None:
            last = self._nodes.pop()
            if last is not node:
                self._nodes[node.candidate_index] = last
                last.candidate_index = node.candidate_index
            node.candidate_index = None

    def all(self) -> list[Node]:
        """Return all nodes. The caller must not change the list."""
        return self._nodes

    def sample(self) -> list[Node]:
        """Return all nodes if there are at most `SAMPLE_SIZE`, else so many drawn at random."""
        nodes = self._nodes
        if len(nodes) <= SAMPLE_SIZE:
            return nodes
        return [nodes[self._random.randrange(len(nodes))] for _ in range(SAMPLE_SIZE)]


def _class(node: Node, *, built_upon: bool) -> CheckpointClass:
    return (node.kind.value, built_upon, min(node.num_returns, MAX_RETURNS))

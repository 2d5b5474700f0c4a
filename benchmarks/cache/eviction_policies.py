"""Textbook eviction policies to compare with the cache's own (`kvcache.eviction`), with the same interface.

A policy ranks nodes of the prefix tree by what it remembers in `node.policy_state`; of a sample of nodes the one with the smallest
rank is evicted: a leaf with its windows, or the windows alone. The policies are recency (LRU), segmented LRU, S3-FIFO (Yang et al.,
SOSP 2023) and GreedyDual-Size-Frequency (Cherkasova, 1998), as closely as the interface allows. Only the last one uses
`lost_tokens` over `freed_bytes`, the tokens to compute again per byte that eviction frees.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transom_worker.kvcache.eviction.eviction_policy import EvictionPolicy
from transom_worker.kvcache.prefix.tree import Node

PROTECTED_SHARE = 0.8
SMALL_SHARE = 0.1
MAX_FREQUENCY = 3
LEAST_GHOSTS = 64
FAR_AHEAD = 1e12  # added to the ranks of nodes that are evicted after all others


class LruPolicy:
    """Least recently used: when a node was made or last returned to."""

    def __init__(self) -> None:
        self._now = 0

    def admitted(self) -> None:
        """Nothing to learn."""

    def created(self, node: Node) -> None:
        """Used now."""
        node.policy_state = self._tick()

    def built_upon(self, node: Node) -> None:
        """Its own time stays; one that a cut made begins here."""
        if node.policy_state is None:
            node.policy_state = self._tick()

    def returned(self, node: Node) -> None:
        """Used now."""
        node.policy_state = self._tick()

    def continued(self, node: Node, upper: Node) -> None:
        """What the request shares is used now."""
        self.returned(upper)

    def returned_inside(self, node: Node, share: float) -> None:
        """Its own time stays: it was not used to its end."""

    def missed(self, chain: Sequence[bytes], begin: int, end: int) -> None:
        """Nothing to learn."""

    def windows_evicted(self, node: Node) -> None:
        """Its segment keeps its time."""

    def removed(self, node: Node) -> None:
        """Forgotten."""

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """The time of last use."""
        return float(node.policy_state) if isinstance(node.policy_state, int) else 0.0

    def _tick(self) -> int:
        self._now += 1
        return self._now


class SegmentedLruPolicy(LruPolicy):
    """New nodes are on probation; one that was returned to is protected, at most `PROTECTED_SHARE` of all."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: set[Node] = set()
        self._protected: OrderedDict[Node, None] = OrderedDict()

    def created(self, node: Node) -> None:
        """On probation."""
        super().created(node)
        self._alive.add(node)

    def returned(self, node: Node) -> None:
        """Protected; the oldest protected one may go back on probation, as the newest there."""
        super().returned(node)
        self._alive.add(node)
        self._protected[node] = None
        self._protected.move_to_end(node)
        if len(self._protected) > PROTECTED_SHARE * len(self._alive):
            oldest, _ = self._protected.popitem(last=False)
            oldest.policy_state = self._tick()

    def windows_evicted(self, node: Node) -> None:
        """What stays of it is nothing to protect."""
        self.removed(node)

    def removed(self, node: Node) -> None:
        """Forgotten."""
        self._alive.discard(node)
        self._protected.pop(node, None)

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """Probation first, then by time."""
        return super().rank(node, lost_tokens, freed_bytes) + FAR_AHEAD * (node in self._protected)


class S3FifoPolicy(LruPolicy):
    """A small queue for new nodes, a main one for those returned to or seen before, both first in, first out.

    A node of the main queue that was returned to goes round once more for each return, up to `MAX_FREQUENCY`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._small: set[Node] = set()
        self._main: dict[Node, int] = {}  # returns since it came here
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def created(self, node: Node) -> None:
        """Into the small queue, or straight into the main one if it went not long ago."""
        super().created(node)
        if any(digest in self._ghosts for digest in node.segment):
            self._main[node] = 0
        else:
            self._small.add(node)

    def returned(self, node: Node) -> None:
        """Counted; out of the small queue into the main one."""
        if node in self._main:
            self._main[node] = min(MAX_FREQUENCY, self._main[node] + 1)
            return
        self._small.discard(node)
        self._main[node] = 0
        node.policy_state = self._tick()

    def windows_evicted(self, node: Node) -> None:
        """Out of its queue."""
        self.removed(node)

    def removed(self, node: Node) -> None:
        """One that goes out of the small queue is remembered, up to the number of nodes."""
        self._main.pop(node, None)
        if node in self._small:
            self._small.remove(node)
            self._ghosts[node.digest] = None
            if len(self._ghosts) > LEAST_GHOSTS + len(self._main):
                self._ghosts.popitem(last=False)

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """The small queue goes first while it is longer than its share; a lap of the main one is as long as that queue."""
        time = super().rank(node, lost_tokens, freed_bytes)
        small_goes = len(self._small) > SMALL_SHARE * (len(self._small) + len(self._main))
        if node in self._main:
            return time + self._main[node] * len(self._main) + FAR_AHEAD * small_goes
        return time + FAR_AHEAD * (not small_goes)


@dataclass(slots=True)
class _Uses:
    frequency: int = 0
    base: float = 0.0  # inflation at the last use
    last_rank: float = 0.0


class GreedyDualPolicy(LruPolicy):
    """Frequency times loss per byte, on top of the rank that the last victim had when the node was last used."""

    def __init__(self) -> None:
        super().__init__()
        self._inflation = 0.0

    def created(self, node: Node) -> None:
        """Used for the first time."""
        node.policy_state = _Uses()
        self.returned(node)

    def built_upon(self, node: Node) -> None:
        """One that a cut made has not been used."""
        node.policy_state = node.policy_state or _Uses()

    def returned(self, node: Node) -> None:
        """Used once more."""
        uses = node.policy_state if isinstance(node.policy_state, _Uses) else _Uses()
        uses.frequency += 1
        uses.base = self._inflation
        node.policy_state = uses

    def windows_evicted(self, node: Node) -> None:
        """A victim."""
        if isinstance(node.policy_state, _Uses):
            self._inflation = max(self._inflation, node.policy_state.last_rank)

    def removed(self, node: Node) -> None:
        """A victim."""
        self.windows_evicted(node)

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """H = L + F * C / S."""
        if not isinstance(node.policy_state, _Uses):
            return 0.0
        node.policy_state.last_rank = node.policy_state.base + node.policy_state.frequency * lost_tokens / max(
            1, freed_bytes
        )
        return node.policy_state.last_rank


POLICIES: dict[str, Callable[[], EvictionPolicy | None]] = {
    "default": lambda: None,  # the cache's own policy
    "lru": LruPolicy,
    "slru": SegmentedLruPolicy,
    "s3fifo": S3FifoPolicy,
    "gdsf": GreedyDualPolicy,
}

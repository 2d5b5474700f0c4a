"""Textbook eviction policies to compare with the cache's own (`kvcache.eviction`), with the same interface.

A policy ranks nodes of the prefix tree by what it remembers in `node.policy_state`; of a sample of nodes the one with the smallest
rank is evicted: a leaf with its windows, or the windows alone. The policies are recency (LRU), GreedyDual-Size-Frequency
(Cherkasova, 1998) and Marconi's (Pan et al., 2025, for hybrids with recurrent states), as closely as the interface allows. The last
two use `lost_tokens` over `freed_bytes`, the tokens to compute again for each byte that eviction frees. Segmented LRU and S3-FIFO
gave their figures at c6cb44c (docs/cache_simulation.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from transom_worker.kvcache.eviction.eviction_policy import EvictionPolicy
from transom_worker.kvcache.prefix.tree import Node


class LruPolicy(EvictionPolicy):
    """Least recently used: when a node was made or last returned to. A node that was not used to its end keeps its time."""

    def __init__(self) -> None:
        self._now = 0

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

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """The time of last use."""
        return float(node.policy_state) if isinstance(node.policy_state, int) else 0.0

    def _tick(self) -> int:
        self._now += 1
        return self._now


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


class MarconiPolicy(LruPolicy):
    """Recency plus `weight` times the computation that a byte saves, both in parts of the largest that was seen.

    Marconi tunes the weight while it serves; here each weight is a policy of its own, so that the best one is known.
    """

    def __init__(self, weight: float) -> None:
        super().__init__()
        self._weight = weight
        self._most_per_byte = 0.0

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """S = recency + weight * efficiency."""
        per_byte = lost_tokens / max(1, freed_bytes)
        self._most_per_byte = max(self._most_per_byte, per_byte)
        recency = super().rank(node, lost_tokens, freed_bytes) / max(1, self._now)
        return recency + self._weight * per_byte / (self._most_per_byte or 1.0)


POLICIES: dict[str, Callable[[], EvictionPolicy | None]] = {
    "default": lambda: None,  # the cache's own policy
    "lru": LruPolicy,
    "gdsf": GreedyDualPolicy,
    **{f"marconi-{weight:g}": partial(MarconiPolicy, weight) for weight in (0.3, 1.0, 3.0)},
}

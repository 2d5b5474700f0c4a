"""The eviction policy to compare with the cache's own (`kvcache.eviction`): least recently used, with the same interface.

A policy ranks nodes of the prefix tree by what it remembers in `node.policy_state`; of a sample of nodes the one with the smallest
rank is evicted: a leaf with its windows, or the windows alone. docs/cache_simulation.md has figures of other rules.
"""

from collections.abc import Callable

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


POLICIES: dict[str, Callable[[], EvictionPolicy | None]] = {
    "default": lambda: None,  # the cache's own policy
    "lru": LruPolicy,
}

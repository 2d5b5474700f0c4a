"""`CheckpointCounts`: counts the checkpoints of each kind that were placed, hit and evicted.

A node is a *checkpoint* while it pins its windows. Kinds are "system", "turn", "prompt" ... (`tree.CheckpointKind`).
"""

from __future__ import annotations

from collections import Counter

from transom_worker.kvcache.prefix.tree import Node
from transom_worker.kvcache.stats import CheckpointStats


class CheckpointCounts:
    """Counts since start, by kind."""

    def __init__(self) -> None:
        self._placed: Counter[str] = Counter()
        self._evicted: Counter[str] = Counter()
        self._windows_evicted: Counter[str] = Counter()
        self._hit: Counter[str] = Counter()

    def placed(self, node: Node) -> None:
        """Count a node that has its windows from now on."""
        self._placed[node.kind.value] += 1

    def evicted(self, node: Node) -> None:
        """Count a node that is evicted with its segment; without windows it was no checkpoint, and is not counted."""
        if node.windows is not None:
            self._evicted[node.kind.value] += 1

    def windows_evicted(self, node: Node) -> None:
        """Count a node whose windows are evicted; its segment stays."""
        self._windows_evicted[node.kind.value] += 1

    def hit(self, node: Node) -> None:
        """Count an admitted request that continues from this checkpoint."""
        self._hit[node.kind.value] += 1

    def stats(self) -> CheckpointStats:
        """Return a copy of the counts."""
        ended = self._evicted + self._windows_evicted
        return CheckpointStats(
            current={kind: count - ended[kind] for kind, count in self._placed.items()},
            placed=dict(self._placed),
            evicted=dict(self._evicted),
            windows_evicted=dict(self._windows_evicted),
            hit=dict(self._hit),
        )

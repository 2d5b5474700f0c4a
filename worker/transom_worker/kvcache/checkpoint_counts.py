"""How many checkpoints of each kind stand, and what became of the others."""

from __future__ import annotations

from collections import Counter

from transom_worker.kvcache.stats import CheckpointStats
from transom_worker.kvcache.tree import Node


class CheckpointCounts:
    """Since start, by kind. A node is a checkpoint while it has its windows."""

    def __init__(self) -> None:
        self._placed: Counter[str] = Counter()
        self._evicted: Counter[str] = Counter()
        self._windows_evicted: Counter[str] = Counter()
        self._hit: Counter[str] = Counter()

    def placed(self, node: Node) -> None:
        """It has its windows from now on."""
        self._placed[node.kind.value] += 1

    def evicted(self, node: Node) -> None:
        """It goes with its segment; one without windows was no checkpoint any more."""
        if node.windows is not None:
            self._evicted[node.kind.value] += 1

    def windows_evicted(self, node: Node) -> None:
        """Its windows go, its segment stays."""
        self._windows_evicted[node.kind.value] += 1

    def hit(self, node: Node) -> None:
        """An admitted request goes on from here."""
        self._hit[node.kind.value] += 1

    def stats(self) -> CheckpointStats:
        """A copy."""
        gone = self._evicted + self._windows_evicted
        return CheckpointStats(
            current={kind: count - gone[kind] for kind, count in self._placed.items()},
            placed=dict(self._placed),
            evicted=dict(self._evicted),
            windows_evicted=dict(self._windows_evicted),
            hit=dict(self._hit),
        )

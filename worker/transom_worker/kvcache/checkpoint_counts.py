"""How many checkpoints of each kind stand, and what became of the others."""

from __future__ import annotations

from collections import Counter

from transom_worker.kvcache.stats import CheckpointStats
from transom_worker.kvcache.tree import Node


class CheckpointCounts:
    """Since start, by kind. A node is a checkpoint while it has its windows."""

    def __init__(self) -> None:
        self._placed: Counter[str] = Counter()
        self._given_up: Counter[str] = Counter()
        self._windows_given_up: Counter[str] = Counter()
        self._hit: Counter[str] = Counter()

    def placed(self, node: Node) -> None:
        """It has its windows from now on."""
        self._placed[node.kind.value] += 1

    def given_up(self, node: Node) -> None:
        """It goes with its segment; one without windows was no checkpoint any more."""
        if node.windows is not None:
            self._given_up[node.kind.value] += 1

    def windows_given_up(self, node: Node) -> None:
        """Its windows go, its segment stays."""
        self._windows_given_up[node.kind.value] += 1

    def hit(self, node: Node) -> None:
        """An admitted request goes on from here."""
        self._hit[node.kind.value] += 1

    def stats(self) -> CheckpointStats:
        """A copy."""
        gone = self._given_up + self._windows_given_up
        return CheckpointStats(
            standing={kind: count - gone[kind] for kind, count in self._placed.items()},
            placed=dict(self._placed),
            given_up=dict(self._given_up),
            windows_given_up=dict(self._windows_given_up),
            hit=dict(self._hit),
        )

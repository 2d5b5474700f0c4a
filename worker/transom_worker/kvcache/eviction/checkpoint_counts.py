"""`CheckpointCounts`: counts the checkpoints of each kind that were placed, hit and evicted.

A node is a *checkpoint* while it pins its windows. Kinds are "system", "turn", "prompt" ... (`tree.CheckpointKind`).
"""

from __future__ import annotations

from collections import Counter

from transom_worker.kvcache.stats import CheckpointStats


class CheckpointCounts:
    """Checkpoints since start, by kind: `placed`, `hit` by admitted requests, `evicted` with their segment, and
    `windows_evicted` while their segment stayed.
    """

    def __init__(self) -> None:
        self.placed: Counter[str] = Counter()
        self.hit: Counter[str] = Counter()
        self.evicted: Counter[str] = Counter()
        self.windows_evicted: Counter[str] = Counter()

    def stats(self) -> CheckpointStats:
        """Return a copy of the counts."""
        ended = self.evicted + self.windows_evicted
        return CheckpointStats(
            current={kind: count - ended[kind] for kind, count in self.placed.items()},
            placed=dict(self.placed),
            evicted=dict(self.evicted),
            windows_evicted=dict(self.windows_evicted),
            hit=dict(self.hit),
        )

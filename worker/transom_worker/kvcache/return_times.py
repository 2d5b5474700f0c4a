"""Learns when clients return to checkpoints, and from that what keeping a checkpoint is worth.

Terms:

    checkpoint  a boundary of a prompt's hash chain at which a request can continue (`tree`)
    class       checkpoints of the same kind, built upon or not, with the same number of returns so far: they share statistics
    age         admitted requests since the checkpoint was placed or last returned to
    bucket      a range of ages; buckets grow by 2/5: [0, 1), [1, 2), [2, 3), [3, 4), [4, 5), [5, 7), [7, 9), ...
    life table  per class and bucket: how many checkpoints were returned to at such an age, and how many were not
    hazard      the chance of a return inside a bucket, given that there was none before: returned / (returned + survived)
    worth       the checkpoint's Gittins index: expected returns per request of waiting, for the best time to stop waiting

Example: of 100 checkpoints of a class, 50 are returned to at age 1, and the others never. Leaving prior and smoothing out, a new
one is worth 0.5 / 1.75 = 0.29 returns per request, one of age 1 is worth 0.5 / 0.75 = 0.67, and one of age 2 is worth nothing.

The worth at age `a` is the maximum over all stopping ages `s > a` of

    P(return between a and s) / E(requests waited until the return or s)

(Gittins 1979; Aggarwal et al., SIGMETRICS 2009, use it likewise). A cyclic scan makes old checkpoints precious, since they are due
next; bursty traffic makes young ones precious. Plain recency is the special case of a falling hazard, which is also the prior.
Evicted checkpoints are watched as well, so that the statistics do not depend on the cache's own decisions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

CheckpointClass = tuple[str, bool, int]  # (kind, has been built upon, returns so far up to `eviction.MAX_RETURNS`)


def _edges() -> list[int]:
    edges = [0, 1, 2, 3]
    while edges[-1] < 2**20:
        edges.append(max(edges[-1] + 1, edges[-1] * 7 // 5))
    return edges


EDGES = _edges()  # bucket b holds ages in [EDGES[b], EDGES[b + 1])
LAST = len(EDGES) - 2  # the last bucket
PRIOR_CHANCE = 0.05  # hazard of a bucket without observations
PRIOR_WEIGHT = 2.0  # observations that the prior counts as
POOL_WEIGHT = 16.0  # observations that the pooled hazard of all classes counts as, beside those of the class itself
DECAY_EVERY = 1024  # requests
DECAY = 0.5  # factor on all counts
REFRESH_EVERY = 16  # requests, after which worths are computed anew


class WatchedCheckpoint:
    """One checkpoint from its last use on, until a client returns to it. `is_ended`: it is not watched any more."""

    __slots__ = ("born", "cls", "is_ended")

    def __init__(self, cls: CheckpointClass, born: int) -> None:
        self.cls = cls
        self.born = born  # admitted requests at its last use
        self.is_ended = False


class _LifeTable:
    """By bucket: how many checkpoints were returned to in it, and how many survived it without a return."""

    __slots__ = ("returned", "survived")

    def __init__(self) -> None:
        self.returned = [0.0] * (LAST + 1)
        self.survived = [0.0] * (LAST + 1)

    def decay(self) -> None:
        self.returned = [DECAY * count for count in self.returned]
        self.survived = [DECAY * count for count in self.survived]


class ReturnTimes:
    """Watches checkpoints, keeps a life table per class, and computes worths. `now` counts admitted requests."""

    def __init__(self) -> None:
        self.now = 0
        self._tables: dict[CheckpointClass, _LifeTable] = {}
        self._pools: tuple[_LifeTable, _LifeTable] = (
            _LifeTable(),
            _LifeTable(),
        )  # all classes not built upon; built upon
        self._in_bucket: list[deque[WatchedCheckpoint]] = [deque() for _ in range(LAST)]
        self._worths: dict[CheckpointClass, list[float]] = {}  # by bucket

    @property
    def num_watched(self) -> int:
        """Entries of checkpoints that have not survived every bucket, those that ended meanwhile included."""
        return sum(map(len, self._in_bucket))

    def tick(self) -> None:
        """Count one more admitted request, and every checkpoint that survives a bucket by it."""
        self.now += 1
        for bucket in range(LAST):
            waiting, end = self._in_bucket[bucket], EDGES[bucket + 1]
            while waiting and self.now - waiting[0].born >= end:
                self._survive(waiting.popleft(), bucket)
        if self.now % REFRESH_EVERY == 0:
            self._worths.clear()
        if self.now % DECAY_EVERY == 0:
            for table in (*self._tables.values(), *self._pools):
                table.decay()

    def watch(self, cls: CheckpointClass) -> WatchedCheckpoint:
        """Begin to watch a checkpoint that was placed or used just now."""
        watched = WatchedCheckpoint(cls, self.now)
        self._in_bucket[0].append(watched)
        return watched

    def returned(self, watched: WatchedCheckpoint) -> None:
        """Count a client's return to a checkpoint, and end watching it."""
        if watched.is_ended:
            return
        watched.is_ended = True
        bucket = self._bucket(watched)
        self._table(watched.cls).returned[bucket] += 1
        self._pools[watched.cls[1]].returned[bucket] += 1

    def forget(self, watched: WatchedCheckpoint) -> None:
        """End watching a checkpoint that has changed its class, and count nothing."""
        watched.is_ended = True

    def worth(self, watched: WatchedCheckpoint) -> float:
        """Return the expected returns per admitted request while the checkpoint is kept, for the best time to stop keeping it."""
        by_bucket = self._worths.get(watched.cls)
        if by_bucket is None:
            by_bucket = self._worths[watched.cls] = self._compute_worths(watched.cls)
        return by_bucket[self._bucket(watched)]

    def _bucket(self, watched: WatchedCheckpoint) -> int:
        return min(LAST, bisect_right(EDGES, self.now - watched.born) - 1)

    def _survive(self, watched: WatchedCheckpoint, bucket: int) -> None:
        """Count a checkpoint that reached the end of a bucket without a return."""
        if watched.is_ended:
            return
        self._table(watched.cls).survived[bucket] += 1
        self._pools[watched.cls[1]].survived[bucket] += 1
        if bucket + 1 < LAST:  # the last bucket has no end
            self._in_bucket[bucket + 1].append(watched)

    def _table(self, cls: CheckpointClass) -> _LifeTable:
        table = self._tables.get(cls)
        if table is None:
            table = self._tables[cls] = _LifeTable()
        return table

    def _hazards(self, cls: CheckpointClass) -> list[float]:
        """Return the hazard of each bucket: the class's own observations, the pooled ones and the prior, by weight."""
        own, pool = self._table(cls), self._pools[cls[1]]
        hazards = []
        for returned, survived, all_returned, all_survived in zip(
            *map(_smooth, (own.returned, own.survived, pool.returned, pool.survived)), strict=True
        ):
            pooled = (all_returned + PRIOR_WEIGHT * PRIOR_CHANCE) / (all_returned + all_survived + PRIOR_WEIGHT)
            hazards.append((returned + POOL_WEIGHT * pooled) / (returned + survived + POOL_WEIGHT))
        return hazards

    def _compute_worths(self, cls: CheckpointClass) -> list[float]:
        """Return the Gittins index at the start of each bucket. Quadratic in the number of buckets."""
        hazards = self._hazards(cls)
        worths = []
        for start in range(LAST + 1):
            # Extend the waiting time bucket by bucket; a return inside a bucket ends the wait in its middle.
            still_waiting, expected_wait, expected_returns, best = 1.0, 0.0, 0.0, 0.0
            for bucket in range(start, LAST + 1):
                width = EDGES[bucket + 1] - EDGES[bucket]
                hazard = hazards[bucket]
                expected_wait += still_waiting * width * (1 - hazard / 2)
                expected_returns += still_waiting * hazard
                still_waiting *= 1 - hazard
                best = max(best, expected_returns / expected_wait)
            worths.append(best)
        return worths


def _smooth(counts: list[float]) -> list[float]:
    """Return each bucket's count mixed with a quarter of each neighbour's.

    The Gittins index takes the best of many ratios; without smoothing it would take noise for the best.
    """
    padded = [counts[0], *counts, counts[-1]]
    return [padded[at] / 4 + here / 2 + padded[at + 2] / 4 for at, here in enumerate(counts)]

"""When clients come back: learned chances of a return by age, and what waiting for it is worth.

Ages are counted in admitted requests and sorted into buckets that grow by about a half. Per class of checkpoint a life table says,
of those that reached a bucket, how many returned inside it; checkpoints that were evicted are still watched, so the table is not
blinded by the cache's own decisions. The worth of keeping one is its Gittins index (Gittins 1979; Aggarwal et al., SIGMETRICS 2009
use it likewise): over all times to wait, the best ratio of the chance of a return to the expected time until return or giving up.
A cyclic scan makes old checkpoints precious (they are due next), bursty traffic young ones; plain recency is the special case of a
falling hazard, which is also the prior.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

CheckpointClass = tuple[str, bool, int]  # (kind, has been built upon, returns so far up to a few)


def _edges() -> list[int]:
    edges = [0, 1, 2, 3]
    while edges[-1] < 2**20:
        edges.append(max(edges[-1] + 1, edges[-1] * 7 // 5))
    return edges


EDGES = _edges()  # bucket b holds ages in [EDGES[b], EDGES[b + 1])
LAST = len(EDGES) - 2
PRIOR_CHANCE = 0.05  # per bucket
PRIOR_WEIGHT = 2.0
POOL_WEIGHT = 16.0  # how many observations of its own outweigh those of similar classes
DECAY_EVERY = 1024  # requests
DECAY = 0.5
REFRESH_EVERY = 16  # requests


class Watch:
    """One checkpoint that a client may return to, from its last use on."""

    __slots__ = ("born", "cls", "ended")

    def __init__(self, cls: CheckpointClass, born: int) -> None:
        self.cls = cls
        self.born = born
        self.ended = False


class _Table:
    """Of one class: by bucket how many returned in it, and how many lived through it."""

    __slots__ = ("returned", "survived")

    def __init__(self) -> None:
        self.returned = [0.0] * (LAST + 1)
        self.survived = [0.0] * (LAST + 1)

    def decay(self) -> None:
        self.returned = [DECAY * count for count in self.returned]
        self.survived = [DECAY * count for count in self.survived]


class ReturnTimes:
    """The life tables. `now` counts admitted requests."""

    def __init__(self) -> None:
        self.now = 0
        self._tables: dict[CheckpointClass, _Table] = {}
        self._pools: tuple[_Table, _Table] = (_Table(), _Table())  # by "has been built upon"
        self._in_bucket: list[deque[Watch]] = [deque() for _ in range(LAST)]
        self._worth: dict[CheckpointClass, list[float]] = {}

    def tick(self) -> None:
        """One more request was admitted."""
        self.now += 1
        for bucket in range(LAST):
            waiting, end = self._in_bucket[bucket], EDGES[bucket + 1]
            while waiting and self.now - waiting[0].born >= end:
                self._outlive(waiting.popleft(), bucket)
        if self.now % REFRESH_EVERY == 0:
            self._worth.clear()
        if self.now % DECAY_EVERY == 0:
            for table in (*self._tables.values(), *self._pools):
                table.decay()

    def watch(self, cls: CheckpointClass) -> Watch:
        """A checkpoint was used just now and may be used again."""
        item = Watch(cls, self.now)
        self._in_bucket[0].append(item)
        return item

    def returned(self, item: Watch) -> None:
        """A client came back to it."""
        if item.ended:
            return
        item.ended = True
        bucket = self._bucket(item)
        self._table(item.cls).returned[bucket] += 1
        self._pools[item.cls[1]].returned[bucket] += 1

    def forget(self, item: Watch) -> None:
        """It is something else from now on: neither returned nor given up."""
        item.ended = True

    def worth(self, item: Watch) -> float:
        """Expected returns per request admitted while it is kept, at the best time to give up."""
        by_bucket = self._worth.get(item.cls)
        if by_bucket is None:
            by_bucket = self._worth[item.cls] = self._compute(item.cls)
        return by_bucket[self._bucket(item)]

    def _bucket(self, item: Watch) -> int:
        return min(LAST, bisect_right(EDGES, self.now - item.born) - 1)

    def _outlive(self, item: Watch, bucket: int) -> None:
        if item.ended:
            return
        self._table(item.cls).survived[bucket] += 1
        self._pools[item.cls[1]].survived[bucket] += 1
        if bucket + 1 < LAST:  # nothing outlives the last bucket
            self._in_bucket[bucket + 1].append(item)

    def _table(self, cls: CheckpointClass) -> _Table:
        table = self._tables.get(cls)
        if table is None:
            table = self._tables[cls] = _Table()
        return table

    def _chances(self, cls: CheckpointClass) -> list[float]:
        own, pool = self._table(cls), self._pools[cls[1]]
        chances = []
        for returned, survived, all_returned, all_survived in zip(
            *map(_smooth, (own.returned, own.survived, pool.returned, pool.survived)), strict=True
        ):
            pooled = (all_returned + PRIOR_WEIGHT * PRIOR_CHANCE) / (all_returned + all_survived + PRIOR_WEIGHT)
            chances.append((returned + POOL_WEIGHT * pooled) / (returned + survived + POOL_WEIGHT))
        return chances

    def _compute(self, cls: CheckpointClass) -> list[float]:
        """The Gittins index at each bucket's start."""
        chances = self._chances(cls)
        worth = []
        for start in range(LAST + 1):
            alive, time, chance, best = 1.0, 0.0, 0.0, 0.0
            for bucket in range(start, LAST + 1):
                width = EDGES[bucket + 1] - EDGES[bucket]
                here = chances[bucket]
                time += alive * width * (1 - here / 2)
                chance += alive * here
                alive *= 1 - here
                best = max(best, chance / time)
            worth.append(best)
        return worth


def _smooth(counts: list[float]) -> list[float]:
    """Each bucket with its neighbours, a quarter each: the index takes the best of many ratios, and would take noise for one."""
    padded = [counts[0], *counts, counts[-1]]
    return [padded[at] / 4 + here / 2 + padded[at + 2] / 4 for at, here in enumerate(counts)]

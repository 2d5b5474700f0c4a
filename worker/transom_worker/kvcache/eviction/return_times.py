"""`ReturnTimes`: learns when clients return to checkpoints, and derives what keeping a checkpoint is worth.

    checkpoint  a node of the prefix tree, from which later requests can continue
    return      a later request that continues from the checkpoint
    built upon  said of a checkpoint that a longer one extends, such as a turn that the next turn continued
    class       checkpoints of the same kind, built upon or not, with the same number of returns so far: they share statistics
    age         requests admitted since the checkpoint was placed or last returned to; admitted requests are the unit of time here
    bucket      a range of ages that ends at 7/5 of its beginning: [0, 1), [1, 2), ... [4, 5), [5, 7), [7, 9), [9, 12), ...
    survive     reach the end of a bucket without a return in it
    life table  per class and bucket: how many checkpoints were returned to at such an age, and how many survived the bucket
    exposed     checkpoints to which a client could return inside a bucket: returned + survived + half of those that are in it now
    hazard      the chance of a return inside a bucket, given that there was none before: returned / exposed
    prior       the hazard that is assumed if nothing was observed yet
    worth       the checkpoint's Gittins index: expected returns per request of waiting, for the best time to stop waiting

"Waiting" means keeping the checkpoint in the cache. The worth at age `a` is the maximum over all stopping ages `s > a` of

    P(return between a and s) / E(requests waited until the return or s)

Example: of 100 checkpoints of a class, 50 are returned to at age 1, and the others never. Without prior and smoothing, and with a
return counted in the middle of its bucket [1, 2), the best stopping age is 2:

    age 0    waits 1 request, then 1/2 (return) or 1 (none) more: 0.5 / (1 + 0.75) = 0.29 returns per request
    age 1    waits 1/2 or 1 request:                              0.5 / 0.75       = 0.67
    age 2    no return comes any more:                            0

The theory is that of Gittins (1979); Aggarwal et al. (SIGMETRICS 2009) use the index in a similar way. If sessions take turns in a
fixed order, old checkpoints are worth most, since their sessions are next; if requests come in bursts, young ones are.
Least-recently-used eviction is the special case of a hazard per request that falls with age. The prior is such a hazard, too: it is
equal in all buckets, and buckets grow with age. Evicted checkpoints are watched as well, so that the statistics do not depend on
what the cache evicted. Only the last `MAX_WATCHES` watches are kept, in compact arrays (`policy_memory`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from transom_worker.kvcache.eviction.policy_memory import WatchRing


class CheckpointClass(NamedTuple):
    """Checkpoints with equal values here share their statistics."""

    kind: str  # `tree.CheckpointKind`, such as "prompt"
    was_built_upon: bool
    num_returns: int  # so far; `eviction_policy.MAX_RETURNS` stands for that many or more


def _bucket_edges() -> list[int]:
    """Return the ages at which buckets begin, each 7/5 of the one before and at least 1 more, up to about a million requests."""
    edges = [0, 1, 2, 3]
    while edges[-1] < 2**20:
        edges.append(max(edges[-1] + 1, edges[-1] * 7 // 5))
    return edges


BUCKET_EDGES = _bucket_edges()  # bucket b has the ages [BUCKET_EDGES[b], BUCKET_EDGES[b + 1])
LAST_BUCKET = len(BUCKET_EDGES) - 2
PRIOR_HAZARD = 0.05  # assumed for every bucket before there are observations
LESS_SIMILAR_WEIGHT = 8.0  # the hazard of less similar classes, or the prior, counts like this many checkpoints
DECAY_EVERY = 1024  # admitted requests, after which all counts are multiplied by `DECAY`
DECAY = 0.5
# Admitted requests after which worths are computed again; fewer at first, when each return changes much.
REFRESH_EVERY = 16


class WatchedCheckpoint(NamedTuple):
    """A watch of one checkpoint, from its placement or last return until the next return."""

    number: int  # of its watch in the ring
    class_id: int
    watched_from: int  # `ReturnTimes.now` when its age was 0


_Similarity = tuple[str | bool | int, ...]  # what classes must have in common for their observations to count together


class _Evidence(NamedTuple):
    """The smoothed observations of all classes that have something in common (`_Similarity`), by bucket."""

    returned: list[float]
    exposed: list[float]  # checkpoints that could have been returned to in the bucket


class _LifeTable:
    """One class's three counts by bucket: checkpoints that were returned to at such an age, that survived the bucket, and that are
    in it now.

    The first two need not be whole numbers, since they decay and a return may count as a fraction.
    """

    __slots__ = ("inside", "returned", "survived")

    def __init__(self) -> None:
        self.returned = [0.0] * (LAST_BUCKET + 1)
        self.survived = [0.0] * (LAST_BUCKET + 1)
        self.inside = [0] * (LAST_BUCKET + 1)

    def exposed(self) -> list[float]:
        """Return, by bucket, for how many checkpoints a return was possible. One that is in the bucket now counts half, since it
        has passed about half of it."""
        return [
            returned + survived + inside / 2
            for returned, survived, inside in zip(self.returned, self.survived, self.inside, strict=True)
        ]

    def decay(self) -> None:
        """Halve the weight of all past observations."""
        self.returned = [DECAY * count for count in self.returned]
        self.survived = [DECAY * count for count in self.survived]


class ReturnTimes:
    """Watches checkpoints, keeps a life table per class, and computes worths. `now` counts admitted requests."""

    def __init__(self, watches: WatchRing | None = None) -> None:
        self.now = 0
        self.watches = watches or WatchRing()
        self._classes: list[CheckpointClass] = []  # by class id
        self._class_ids: dict[CheckpointClass, int] = {}
        self._tables: list[_LifeTable] = []  # by class id
        # By bucket: the number of the oldest watch that has not left it yet. Watches with lower numbers are older. The last bucket
        # has no entry, since no watch leaves it.
        self._first_in_bucket = [0] * LAST_BUCKET
        self._refresh_at = 0
        # Until the next refresh:
        self._worths: dict[int, list[float]] = {}  # by class id, then by bucket
        self._evidence: dict[_Similarity, _Evidence] = {}

    def tick(self) -> None:
        """Advance the clock by one admitted request, and count every checkpoint that has just survived its bucket."""
        self.now += 1
        watches = self.watches
        for bucket in range(LAST_BUCKET):
            number, latest = max(watches.first, self._first_in_bucket[bucket]), self.now - BUCKET_EDGES[bucket + 1]
            while number < watches.end and watches.began_at(number) <= latest:
                self._survive(watches.class_of_running(number), bucket)
                number += 1
            self._first_in_bucket[bucket] = number
        if self.now >= self._refresh_at:
            self._worths.clear()
            self._evidence.clear()
            self._refresh_at = self.now + min(REFRESH_EVERY, 1 + self.now // (4 * REFRESH_EVERY))
        if self.now % DECAY_EVERY == 0:
            for table in self._tables:
                table.decay()

    def watch(self, checkpoint_class: CheckpointClass) -> WatchedCheckpoint:
        """Begin to watch a checkpoint that was placed or returned to just now."""
        class_id = self._class_ids.get(checkpoint_class)
        if class_id is None:
            class_id = self._class_ids[checkpoint_class] = len(self._classes)
            self._classes.append(checkpoint_class)
            self._tables.append(_LifeTable())
        if self.watches.is_full:
            self.forget(self.watches.first)
        self._tables[class_id].inside[0] += 1
        return WatchedCheckpoint(self.watches.begin(class_id, self.now), class_id, self.now)

    def class_of(self, class_id: int) -> CheckpointClass:
        """Return the class with this id."""
        return self._classes[class_id]

    def returned(self, number: int, share: float = 1.0) -> None:
        """Count a client's return to a checkpoint, and end its watch, whose number is given; do nothing if the watch has ended.

        `share` is the fraction of the checkpoint's segment that the client's request shares: it counts as that fraction of a
        return.
        """
        watches = self.watches
        class_id = watches.class_of_running(number) if number >= watches.first else None
        if class_id is None:
            return
        bucket = self._bucket(watches.began_at(number))
        table = self._tables[class_id]
        table.returned[bucket] += share
        table.inside[bucket] -= 1
        watches.stop(number)

    def forget(self, number: int) -> None:
        """End a watch without counting a return: its checkpoint has changed its class, or the ring needs its place."""
        self.returned(number, 0.0)

    def worth(self, watched: WatchedCheckpoint) -> float:
        """Return the expected returns per admitted request while the checkpoint is kept, for the best time to stop keeping it."""
        by_bucket = self._worths.get(watched.class_id)
        if by_bucket is None:
            by_bucket = self._worths[watched.class_id] = _worths(self._hazards(watched.class_id))
        return by_bucket[self._bucket(watched.watched_from)]

    def _bucket(self, watched_from: int) -> int:
        """Return the bucket of a checkpoint's age, if its watch began at `watched_from`."""
        return min(LAST_BUCKET, bisect_right(BUCKET_EDGES, self.now - watched_from) - 1)

    def _survive(self, class_id: int | None, bucket: int) -> None:
        """Count a checkpoint of this class that has survived a bucket. None: its watch has ended, and nothing is counted."""
        if class_id is not None:
            table = self._tables[class_id]
            table.survived[bucket] += 1
            table.inside[bucket] -= 1
            table.inside[bucket + 1] += 1

    def _hazards(self, class_id: int) -> list[float]:
        """Return the hazard of each bucket, estimated from all classes, then from more and more similar ones.

        The hazard of less similar classes counts like `LESS_SIMILAR_WEIGHT` = 8 more checkpoints. Example: 8 returns among 16
        checkpoints of the class, and a hazard of 0.1 in similar classes together: (8 + 8 * 0.1) / (16 + 8) = 0.37.
        """
        hazards = [PRIOR_HAZARD] * (LAST_BUCKET + 1)
        for similarity in _similarities(self._classes[class_id]):
            evidence = self._evidence.get(similarity)
            if evidence is None:
                evidence = self._evidence[similarity] = self._collect(similarity)
            hazards = [
                (returned + LESS_SIMILAR_WEIGHT * hazard) / (exposed + LESS_SIMILAR_WEIGHT)
                for returned, exposed, hazard in zip(*evidence, hazards, strict=True)
            ]
        return hazards

    def _collect(self, similarity: _Similarity) -> _Evidence:
        """Add up the tables of all classes with this similarity."""
        returned, exposed = [0.0] * (LAST_BUCKET + 1), [0.0] * (LAST_BUCKET + 1)
        for one, table in zip(self._classes, self._tables, strict=True):
            if similarity in _similarities(one):
                returned = list(map(add, returned, table.returned))
                exposed = list(map(add, exposed, table.exposed()))
        return _Evidence(_smooth(returned), _smooth(exposed))


def _worths(hazards: Sequence[float]) -> list[float]:
    """Return the worth at the start of each bucket, from the hazard in each. A return counts as one in the middle of its bucket.

    A *stretch* is a range of ages that is waited through as a whole: (expected wait, expected returns, chance of no return until
    its end), all seen from its beginning. The loop goes from the last bucket to the first. Each bucket begins a stretch, which is
    joined with the next stretch for as long as that one yields at least as many returns per request of waiting. The ratio of the
    joined stretch is then the maximum over all stopping ages.
    """
    worths: list[float] = []
    # The stretch of the lowest ages is last in the list. Each one is worth less than the one after it in the list, since it would
    # have been joined otherwise.
    stretches: list[tuple[float, float, float]] = []
    for bucket in reversed(range(LAST_BUCKET + 1)):
        hazard, width = hazards[bucket], BUCKET_EDGES[bucket + 1] - BUCKET_EDGES[bucket]
        # With a return the wait is half of the bucket on average: hazard * width / 2 + (1 - hazard) * width.
        wait, returns, remains = width * (1 - hazard / 2), hazard, 1 - hazard
        # For as long as the next stretch's returns / wait is at least this one's:
        while stretches and stretches[-1][1] * wait >= returns * stretches[-1][0]:
            next_wait, next_returns, next_remains = stretches.pop()
            wait, returns, remains = (
                wait + remains * next_wait,
                returns + remains * next_returns,
                remains * next_remains,
            )
        stretches.append((wait, returns, remains))
        worths.append(returns / wait)
    return worths[::-1]


def _similarities(of: CheckpointClass) -> tuple[_Similarity, ...]:
    """Return what a class has in common with others, the most general first: first built upon or not and returned to or not, then
    the class itself."""
    return (of.was_built_upon, of.num_returns > 0), of


def _smooth(counts: list[float]) -> list[float]:
    """Return each bucket's count averaged with its neighbours': a quarter of each neighbour's count and half of its own.

    A worth is the largest of many ratios; without smoothing, the largest would often be large by chance alone.
    """
    padded = [counts[0], *counts, counts[-1]]
    return [padded[at] / 4 + here / 2 + padded[at + 2] / 4 for at, here in enumerate(counts)]

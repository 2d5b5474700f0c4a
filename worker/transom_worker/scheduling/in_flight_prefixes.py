"""Units that running sequences compute now and publish soon, and who waits for them in place of computing them too.

A sequence waits for one that stands before it in order and is at least as far as it could begin itself: so it loses nothing, since
it would compute the same units later in every step. It waits for the units that both share, not for the other's end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from transom_worker.kvcache.prefix_search import Hit
from transom_worker.scheduling.queue import OrderedQueue
from transom_worker.scheduling.sequence import Sequence

# A wait costs its sequence a step or two. So many tokens take about as long to compute as a GPU takes to read a model's weights.
LEAST_SHARED_TOKENS = 128


@dataclass(slots=True)
class _Announced:
    """Units `[begin, end)` of a running sequence that are not published yet; its followers, and how many units each waits for."""

    begin: int
    end: int
    followers: dict[Sequence, int] = field(default_factory=dict)


class Upcoming:
    """Who computes which unit, by digest. Whoever is in `following` waits for a running sequence that will publish its units.

    Where two compute the same unit, the further one has it, or the one first in order: a wait for it is the shorter one.
    """

    def __init__(self, block_size: int) -> None:
        self.following = OrderedQueue()
        self.least_shared_tokens = LEAST_SHARED_TOKENS
        self._unit = block_size
        self._computed_by: dict[bytes, Sequence] = {}
        self._announced: dict[Sequence, _Announced] = {}
        self._leaders: dict[Sequence, Sequence] = {}  # by follower

    def announce(self, sequence: Sequence) -> None:
        """A sequence was let in: what lies behind its hit will come, and so will the windows that it repairs."""
        blocks, chain, computed_by = sequence.blocks, sequence.chain, self._computed_by
        assert blocks is not None
        announced = _Announced(blocks.num_published - (blocks.replay_until > 0), len(chain))
        if announced.begin >= announced.end:
            return
        self._announced[sequence] = announced
        for digest in chain[announced.begin : announced.end]:
            other = computed_by.setdefault(digest, sequence)
            if other is not sequence and (other.scheduled < sequence.scheduled or sequence.key < other.key):
                computed_by[digest] = sequence

    def leader_of(self, sequence: Sequence, hit: Hit) -> tuple[Sequence, int] | None:
        """Whom a sequence with this hit should wait for, and for how many units; None: it computes what it lacks."""
        unit, chain = self._unit, sequence.chain
        least_units = -(-(hit.start + self.least_shared_tokens) // unit)
        repairs = hit.start < hit.num_units * unit
        for at in (hit.num_units, hit.num_units - 1)[: 1 + repairs]:
            if max(at + 1, least_units) > hit.limit:
                continue
            leader = self._computed_by.get(chain[at])
            if leader is None or leader.key > sequence.key or leader.scheduled < hit.start:
                continue
            units = _num_shared(chain, leader.chain, at + 1, min(hit.limit, self._announced[leader].end))
            if units >= least_units:
                return leader, units
        return None

    def follow(self, sequence: Sequence, leader: Sequence, units: int) -> None:
        """The sequence waits until the leader has published so many units."""
        self._announced[leader].followers[sequence] = units
        self._leaders[sequence] = leader
        # whole units: window blocks are shared out in those
        sequence.owed = (-(-len(sequence.token_ids) // self._unit) - units) * self._unit
        self.following.add(sequence)

    def published(self, sequence: Sequence) -> Iterable[Sequence]:
        """A running sequence has published what it processed: returns those who need not wait for it any more."""
        announced = self._announced.get(sequence)
        if announced is None:
            return ()
        assert sequence.blocks is not None
        num_done = sequence.blocks.processed // self._unit
        self._forget(sequence, announced, num_done)
        served = [follower for follower, units in announced.followers.items() if units <= num_done]
        for follower in served:
            self.stop_following(follower)
        if announced.begin >= announced.end:
            del self._announced[sequence]
        return served

    def left(self, sequence: Sequence) -> Iterable[Sequence]:
        """A sequence runs no longer: returns those who waited for it."""
        announced = self._announced.get(sequence)
        if announced is None:
            return ()
        self._forget(sequence, announced, announced.end)
        followers = list(announced.followers)
        for follower in followers:
            self.stop_following(follower)
        del self._announced[sequence]
        return followers

    def stop_following(self, sequence: Sequence) -> bool:
        """Let a sequence wait for nobody; whether it did for somebody."""
        leader = self._leaders.pop(sequence, None)
        if leader is None:
            return False
        del self._announced[leader].followers[sequence]
        self.following.remove(sequence)
        return True

    def _forget(self, sequence: Sequence, announced: _Announced, end: int) -> None:
        for digest in sequence.chain[announced.begin : end]:
            if self._computed_by.get(digest) is sequence:
                del self._computed_by[digest]
        announced.begin = max(announced.begin, end)


def _num_shared(chain: list[bytes], other: list[bytes], low: int, high: int) -> int:
    """How many first units two chains share, known to be at least `low`, up to `high`."""
    return bisect_left(range(high), True, lo=low, key=lambda unit: chain[unit] != other[unit])

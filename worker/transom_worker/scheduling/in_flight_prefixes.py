"""Units that running sequences compute now and publish soon, and who waits for them in place of computing them too.

A sequence waits for one that stands before it in order and is at least as far as it could begin itself: so it loses nothing, since
it would compute the same units later in every step. It waits for the units that both share, not for the other's end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from transom_worker.kvcache.prefix_search import PrefixHit
from transom_worker.scheduling.queue import OrderedQueue
from transom_worker.scheduling.sequence import Sequence

# A wait costs its sequence a step or two. So many tokens take about as long to compute as a GPU takes to read a model's weights.
MIN_SHARED_TOKENS = 128


@dataclass(slots=True)
class _InFlightRange:
    """Units `[begin, end)` of a running sequence that are not published yet; its waiters, and how many units each waits for."""

    begin: int
    end: int
    waiters: dict[Sequence, int] = field(default_factory=dict)


class InFlightPrefixes:
    """Who computes which unit, by digest. Whoever is in `waiters` waits for a running sequence that will publish its units.

    Where two compute the same unit, the further one has it, or the one first in order: a wait for it is the shorter one.
    """

    def __init__(self, block_size: int) -> None:
        self.waiters = OrderedQueue()
        self.min_shared_tokens = MIN_SHARED_TOKENS
        self._unit = block_size
        self._computed_by: dict[bytes, Sequence] = {}
        self._ranges: dict[Sequence, _InFlightRange] = {}
        self._producers: dict[Sequence, Sequence] = {}  # by waiter

    def register(self, sequence: Sequence) -> None:
        """A sequence was let in: what lies behind its hit will come, and so will the windows that it repairs."""
        blocks, chain, computed_by = sequence.blocks, sequence.chain, self._computed_by
        assert blocks is not None
        computed = _InFlightRange(blocks.num_published - (blocks.repair_until > 0), len(chain))
        if computed.begin >= computed.end:
            return
        self._ranges[sequence] = computed
        for digest in chain[computed.begin : computed.end]:
            other = computed_by.setdefault(digest, sequence)
            if other is not sequence and (other.scheduled < sequence.scheduled or sequence.key < other.key):
                computed_by[digest] = sequence

    def producer_for(self, sequence: Sequence, hit: PrefixHit) -> tuple[Sequence, int] | None:
        """Whom a sequence with this hit should wait for, and for how many units; None: it computes what it lacks."""
        unit, chain = self._unit, sequence.chain
        least_units = -(-(hit.start + self.min_shared_tokens) // unit)
        repairs = hit.start < hit.num_hash_blocks * unit
        for at in (hit.num_hash_blocks, hit.num_hash_blocks - 1)[: 1 + repairs]:
            if max(at + 1, least_units) > hit.limit:
                continue
            producer = self._computed_by.get(chain[at])
            if producer is None or producer.key > sequence.key or producer.scheduled < hit.start:
                continue
            units = _num_shared(chain, producer.chain, at + 1, min(hit.limit, self._ranges[producer].end))
            if units >= least_units:
                return producer, units
        return None

    def wait_for(self, sequence: Sequence, producer: Sequence, units: int) -> None:
        """The sequence waits until the producer has published so many units."""
        self._ranges[producer].waiters[sequence] = units
        self._producers[sequence] = producer
        # whole units: window blocks are shared out in those
        sequence.reserved_tokens = (-(-len(sequence.token_ids) // self._unit) - units) * self._unit
        self.waiters.add(sequence)

    def published(self, sequence: Sequence) -> Iterable[Sequence]:
        """A running sequence has published what it processed: returns those who need not wait for it any more."""
        computed = self._ranges.get(sequence)
        if computed is None:
            return ()
        assert sequence.blocks is not None
        num_done = sequence.blocks.processed // self._unit
        self._forget(sequence, computed, num_done)
        served = [waiter for waiter, units in computed.waiters.items() if units <= num_done]
        for waiter in served:
            self.stop_waiting(waiter)
        if computed.begin >= computed.end:
            del self._ranges[sequence]
        return served

    def stopped_running(self, sequence: Sequence) -> Iterable[Sequence]:
        """A sequence runs no longer: returns those who waited for it."""
        computed = self._ranges.get(sequence)
        if computed is None:
            return ()
        self._forget(sequence, computed, computed.end)
        waiters = list(computed.waiters)
        for waiter in waiters:
            self.stop_waiting(waiter)
        del self._ranges[sequence]
        return waiters

    def stop_waiting(self, sequence: Sequence) -> bool:
        """Let a sequence wait for nobody; whether it did for somebody."""
        producer = self._producers.pop(sequence, None)
        if producer is None:
            return False
        del self._ranges[producer].waiters[sequence]
        self.waiters.remove(sequence)
        return True

    def _forget(self, sequence: Sequence, computed: _InFlightRange, end: int) -> None:
        for digest in sequence.chain[computed.begin : end]:
            if self._computed_by.get(digest) is sequence:
                del self._computed_by[digest]
        computed.begin = max(computed.begin, end)


def _num_shared(chain: list[bytes], other: list[bytes], low: int, high: int) -> int:
    """How many first units two chains share, known to be at least `low`, up to `high`."""
    return bisect_left(range(high), True, lo=low, key=lambda unit: chain[unit] != other[unit])

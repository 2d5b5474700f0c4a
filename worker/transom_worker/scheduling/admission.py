"""Who holds blocks: lets waiting sequences in, makes room for running ones, and takes memory back.

The oldest running sequence always makes progress: memory that it lacks is taken from the last in order, by recompute. Alone it
fits, however its blocks lie scattered, since the cache moves them together. Who waits for blocks holds up those behind it; who
waits for units that another computes (`in_flight_prefixes`) steps aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from transom_worker.kvcache.hashing import extend_chain
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.prefix_search import PrefixHit
from transom_worker.kvcache.tree import CheckpointKind
from transom_worker.scheduling.in_flight_prefixes import InFlightPrefixes
from transom_worker.scheduling.listener import SchedulerListener
from transom_worker.scheduling.queue import OrderedQueue
from transom_worker.scheduling.sequence import Sequence, SequenceStatus
from transom_worker.scheduling.work_counts import WorkCounts


class AdmissionControl:
    """The two queues and the cache. Blocks of a sequence that a step in flight computes stay until that step has answered."""

    def __init__(self, cache: KvCache, work: WorkCounts) -> None:
        self.cache = cache
        self._work = work
        self.running = OrderedQueue()
        self.waiting = OrderedQueue()  # without those that follow others
        self.in_flight_prefixes = InFlightPrefixes(cache.block_size)
        self.listeners: list[SchedulerListener] = []
        self.finished_ids: list[int] = []  # ranks have not been told yet
        self._num_held = 0  # PREEMPTING or FINISHED sequences whose blocks a step in flight still uses
        self._next_seq_id = 0
        self._blocked: Sequence | None = None  # the first waiting one did not fit
        self._blocked_at = 0  # `cache.num_releases` then

    @property
    def num_waiting(self) -> int:
        """Sequences that are not running, those that follow others with them."""
        return len(self.waiting) + len(self.in_flight_prefixes.waiters)

    @property
    def num_running_slots_used(self) -> int:
        """Sequences that run, and those that would but for whom they follow: nobody behind takes their seats."""
        return len(self.running) + len(self.in_flight_prefixes.waiters)

    @property
    def all_waiting(self) -> Iterator[Sequence]:
        """They themselves."""
        yield from self.waiting
        yield from self.in_flight_prefixes.waiters

    def num_before(self, sequence: Sequence) -> int:
        """How many of them stand before one."""
        return self.waiting.num_before(sequence) + self.in_flight_prefixes.waiters.num_before(sequence)

    def enqueue(self, sequence: Sequence) -> None:
        """Let a new sequence wait for its turn."""
        self.waiting.add(sequence)

    def drop(self, sequence: Sequence) -> None:
        """End a sequence, wherever it stands."""
        if sequence.status is SequenceStatus.WAITING:
            if not self.in_flight_prefixes.stop_waiting(sequence):
                self.waiting.remove(sequence)
        else:
            self._rejoin(self.in_flight_prefixes.stopped_running(sequence))
            if sequence.num_in_flight and sequence.status is SequenceStatus.RUNNING:
                self._num_held += 1
            self.running.remove(sequence)
            if not sequence.num_in_flight:
                self._end(sequence)
        sequence.status = SequenceStatus.FINISHED

    def settle(self, sequence: Sequence) -> None:
        """No step in flight computes this PREEMPTING or FINISHED sequence any more: its blocks come free."""
        self._num_held -= 1
        if sequence.status is SequenceStatus.PREEMPTING:
            self._preempt(sequence)
        else:
            self._end(sequence)

    def make_room(self, sequence: Sequence, count: int, *, steps_in_flight: int) -> int:
        """Tokens, up to `count`, that a running sequence has blocks for now; 0 if it must wait or was preempted itself."""
        while True:
            fitting = self._extend(sequence, count)
            if fitting or self._num_held:  # else what a step in flight holds comes free first
                return fitting
            victim = self.running.last
            if victim is sequence and len(self.running) == 1:
                if not steps_in_flight:
                    raise RuntimeError(f"{sequence.request.request_id} was let in as fitting, and does not fit alone")
                return 0  # windows slide when the result arrives
            if victim.num_in_flight:
                victim.status = SequenceStatus.PREEMPTING
                self._rejoin(self.in_flight_prefixes.stopped_running(victim))
                self._num_held += 1
                return 0
            self._preempt(victim)
            if victim is sequence:
                return 0

    def preempt_all(self) -> None:
        """Nothing in the slab can be trusted: every running sequence is computed again. No step may be in flight."""
        for sequence in list(self.running):
            self._preempt(sequence)
        self.cache.evict_all()

    def published(self, sequence: Sequence) -> None:
        """A result of a sequence was received: whoever waited for just that may go on from it."""
        self._rejoin(self.in_flight_prefixes.published(sequence))

    def reserved_before(self, sequence: Sequence, *, num_free_slots: int) -> int:
        """Tokens that a running sequence leaves those who need not follow others any more and stand before it.

        They would run, and be served first, had they not stepped aside. No more of them can be let in than there are free seats.
        """
        reserved_tokens = 0
        for one in islice(self.waiting, max(0, num_free_slots)):
            if not one.reserved_tokens or one.key > sequence.key:
                break
            reserved_tokens += one.reserved_tokens
        return reserved_tokens

    def admit_next(self, budget: int) -> tuple[Sequence, int] | None:
        """Let the first waiting sequence in: it, and the tokens up to `budget` that it starts with; None if it must wait.

        0 tokens: it stepped aside, since a running sequence computes what it needs, and the next one may be tried.
        """
        sequence = self.waiting.first
        busy = len(self.running) > 0 or self._num_held > 0
        if sequence.num_ready <= 0:  # preempted at its length limit: the engine is about to finish it
            return None
        if busy and self._is_blocked(sequence):
            return None
        hit = self._find_hit(sequence)
        if hit is not None and self._steps_aside(sequence, hit):
            return sequence, 0
        count = self._admit(sequence, hit, budget, busy)
        if not count:
            self._blocked, self._blocked_at = sequence, self.cache.num_releases
            return None
        return sequence, count

    def _is_blocked(self, sequence: Sequence) -> bool:
        """Whether it did not fit, and since then nobody left and windows let go hardly more than running sequences took.

        To try costs as much as the hit is long, so it is not done for every block that slides out of a window.
        """
        return self._blocked is sequence and self.cache.num_releases - self._blocked_at <= len(self.running)

    def _steps_aside(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Whether it waits for another's units; what is live where the two part is kept for it."""
        found = self.in_flight_prefixes.producer_for(sequence, hit)
        if found is None:
            return False
        leader, units = found
        assert leader.blocks is not None
        self.cache.plan_fork_checkpoint(leader.blocks, units)
        self.waiting.remove(sequence)
        self.in_flight_prefixes.wait_for(sequence, leader, units)
        return True

    def _rejoin(self, followers: Iterable[Sequence]) -> None:
        """Back to their places in the queue, to be tried however little memory came free."""
        for sequence in followers:
            self.waiting.add(sequence)
            if self._blocked is sequence:
                self._blocked = None

    def _admit(self, sequence: Sequence, hit: PrefixHit | None, budget: int, busy: bool) -> int:
        version = self.cache.index_version
        sequence.reserved_tokens = 0
        blocks = self.cache.begin(sequence.chain, sequence.root, hit=hit)
        sequence.blocks, sequence.scheduled = blocks, blocks.processed
        count = min(sequence.num_ready, budget)
        if not busy:
            count = self._extend(sequence, count)
        # one block for each that runs stays within reach, or they would soon preempt it
        elif not self.cache.extend(blocks, sequence.scheduled + count, reserve=len(self.running)):
            count = 0
        if not count:
            self.cache.release(blocks, kind=None)
            sequence.leave()
            return 0
        self.cache.plan_checkpoints(blocks, self._checkpoints(sequence, hit), is_new=not sequence.admitted)
        tokens = self._count_outcome(sequence, hit, version)
        self._work.admitted(sequence, blocks)
        self.waiting.remove(sequence)
        self.running.add(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.seq_id = self._next_seq_id
        self._next_seq_id += 1
        self.in_flight_prefixes.register(sequence)
        for listener in self.listeners:
            listener.admitted(sequence, tokens=tokens)
        return count

    def _checkpoints(self, sequence: Sequence, hit: PrefixHit | None) -> list[tuple[int, CheckpointKind]]:
        """Where the client may come back to, beyond the hit: end of the system part, last two turns, end of the prompt."""
        unit = self.cache.block_size
        turns = sequence.request.turn_boundaries
        places = {turns[0] // unit: CheckpointKind.SYSTEM} if turns else {}
        places |= {end // unit: CheckpointKind.TURN for end in turns[1:][-2:]}
        places[(len(sequence.token_ids) - 1) // unit] = CheckpointKind.PROMPT
        begin = hit.num_hash_blocks if hit else 0
        return sorted((units, kind) for units, kind in places.items() if units > begin)

    def _find_hit(self, sequence: Sequence) -> PrefixHit | None:
        """None where the sequence reads no cache."""
        if not self.cache.enable_prefix_caching:
            return None
        extend_chain(sequence.chain, sequence.root, sequence.token_ids, self.cache.block_size)
        if sequence.wants_prompt_logprobs:
            return None
        return self.cache.find(sequence.chain, len(sequence.token_ids))

    def _extend(self, sequence: Sequence, count: int) -> int:
        """Blocks for `count` more tokens, or for as many as fit by halving; 0 if not even for one."""
        blocks = sequence.blocks
        assert blocks is not None
        while count and not self.cache.extend(blocks, sequence.scheduled + count, compact=count == 1):
            count //= 2
        return count

    def _count_outcome(self, sequence: Sequence, hit: PrefixHit | None, version: int) -> Mapping[str, int]:
        """Tokens by outcome: those of the prompt, counted once, or what an earlier admission had computed already."""
        if sequence.admitted:
            if hit is None:
                return {}
            return {"hit": hit.start, "repaired": hit.num_hash_blocks * self.cache.block_size - hit.start}
        sequence.admitted = True
        sequence.index_version = version
        num_prompt = sequence.num_prompt_tokens
        if hit is not None:
            sequence.num_cached_tokens = min(hit.start, num_prompt)
        return self.cache.outcomes.count(
            hit, sequence.chain, num_tokens=len(sequence.token_ids), num_prompt_tokens=num_prompt
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; what it published stays cached, the rest is computed again."""
        assert sequence.blocks is not None
        self._work.preempted(sequence, sequence.blocks)
        for listener in self.listeners:
            listener.preempted(sequence, mode="recompute")
        self.running.remove(sequence)
        self._rejoin(self.in_flight_prefixes.stopped_running(sequence))
        self._release(sequence, CheckpointKind.PREEMPTED)
        sequence.leave()
        self.waiting.add(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Keep what the client may continue from, unless it left before the first token."""
        self._release(sequence, CheckpointKind.GENERATION if sequence.has_output else None)

    def _release(self, sequence: Sequence, kind: CheckpointKind | None) -> None:
        assert sequence.blocks is not None
        self.cache.release(sequence.blocks, kind=kind)
        self._blocked = None
        sequence.blocks = None
        self.finished_ids.append(sequence.seq_id)

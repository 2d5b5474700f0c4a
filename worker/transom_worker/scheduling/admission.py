"""`AdmissionControl`: admits waiting sequences, gives running ones KV blocks for their next tokens, and preempts when memory is
short.

Terms (those about clients are in `clients` and `fair_preemption`):

    sequence         one request inside the scheduler; sequences are served in the *order* of their keys: by arrival or priority
    step in flight   a step that was planned and whose result has not arrived ("has not answered")
    hit              the cached prefix of a sequence's tokens, which need no computing
    admit            move a sequence from the queue to the running ones: it starts at its hit and gets its first blocks
    preempt          release a running sequence's blocks and return it to the queue; it is computed again later ("recompute"), or
                     its blocks go to the host tier and come back ("swap", `sequence_moves`)
    producer         a running sequence that computes, or a load that brings, a prefix which a waiting sequence needs too
                     (`in_flight_prefixes`)
    waiter           a sequence that awaits a producer's prefix, outside of the queue
    reserved tokens  tokens of a step that a running sequence leaves to former waiters that stand before it in order
    held             said of a new sequence outside of the queue: its prefix is being fetched, or its grammar compiled
    blocked          said of a client whose first sequence in the queue did not fit when it was last tried
    slice            the least time that a sequence runs before another client may claim its slot or memory (`fair_preemption`)
    checkpoint       a boundary of a prompt at which the cache keeps what a later request needs to continue there

Three rules hold for the sequences of one client. Several clients take turns at being admitted (`clients`), and `fair_preemption`
chooses whose sequence is preempted.

- The first running sequence in order always makes progress. Blocks that it lacks are taken from the last running sequence,
  which is preempted. Alone it always fits: requests that never could are refused (`request_validation`), and if free blocks
  lie scattered over pages, the cache moves blocks together.
- If the first sequence of the queue lacks blocks, no sequence after it is admitted, so the order is kept. A waiter is not in
  the queue, so sequences after it are admitted.
- The blocks of a sequence that a step in flight computes are released only when that step has answered.

Example of the last rule, with two steps in flight: step 7 computes sequence B. While step 7 is unanswered, A needs a block and
B is the last in order. B becomes PREEMPTING and A waits. When step 7's result arrives, B's blocks are released, B returns to
the queue, and the next plan computes A.
"""

import math
from collections.abc import Iterable, Mapping

from transom_core.config import PreemptionMode
from transom_core.kv_cache.prefix_search import PrefixHit
from transom_worker.kvcache.blocks.sequence_blocks import BlocksState, SequenceBlocks
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.prefix.tree import CheckpointKind
from transom_worker.kvcache.tiers.loads import Load
from transom_worker.scheduling.attention_history import AttentionHistory
from transom_worker.scheduling.clients import Client, Clients, ClientsQueue, WaitingSequences
from transom_worker.scheduling.fair_preemption import FairPreemption
from transom_worker.scheduling.in_flight_prefixes import InFlightPrefixes
from transom_worker.scheduling.listener import SchedulerListener
from transom_worker.scheduling.prefix_hits import checkpoint_boundaries, count_outcome, find_hit
from transom_worker.scheduling.sequence import AwaitsPrefix, InQueue, Sequence, SequenceStatus, Wait
from transom_worker.scheduling.sequence_moves import SequenceMoves
from transom_worker.scheduling.work_counts import PolicyCounts, WorkCounts

MAX_TRIED_CLIENTS = 32  # the first ones in turn, in one step: each may cost a search in the prefix cache


class AdmissionControl:
    """Owns the waiting and the running sequences, and the ids that the ranks must still be told to forget."""

    def __init__(self, cache: KvCache, work: WorkCounts, *, preemption_mode: PreemptionMode = "auto") -> None:
        self.cache = cache
        self.moves = SequenceMoves(cache, work, mode=preemption_mode)
        self._work = work
        self.clients = Clients()
        self.fair = FairPreemption(self.clients, [group.block_bytes for group in cache.layout.groups])
        self.running = ClientsQueue(self.clients, lambda client: client.running)
        self.waiting = WaitingSequences(self.clients)
        self.in_flight_prefixes = InFlightPrefixes(cache.block_size, self.waiting)
        self.listeners: list[SchedulerListener] = []
        self.policy_counts = PolicyCounts()
        self._finished_ids: list[int] = []  # released sequences that no plan has named as finished yet
        self._num_awaiting_release = 0  # PREEMPTING or FINISHED sequences whose blocks a step in flight still uses
        self._next_seq_id = 0
        # Client -> (the `wait` of its first sequence in the queue, which did not fit; `cache.num_releases` at that time). If the
        # sequence leaves the queue, it gets another `wait`, and the entry is of no effect.
        self.blocked: dict[Client, tuple[Wait, int]] = {}

    @property
    def num_running_slots_used(self) -> int:
        """Running slots (`max_num_seqs`) in use. A waiter counts too: it keeps a slot, so that no later sequence can take it."""
        return len(self.running) + len(self.waiting.awaiting_prefix)

    @property
    def _is_busy(self) -> bool:
        """Whether any sequence holds blocks on the device: running ones do, and those that a step in flight still computes."""
        return len(self.running) > 0 or self._num_awaiting_release > 0

    def is_blocked(self, client: Client) -> bool:
        """Return whether a client's first sequence in the queue did not fit when it was last tried, too few blocks were freed since
        then, and it can claim no other client's.

        A try takes time in proportion to the length of the hit, so it is not repeated for every block that slides out of a
        window. Each running sequence may have taken one freed block, so the sequence is tried again when more blocks were freed
        than there are running sequences. Example: with 3 running sequences it is tried again after 4 freed blocks. A claim that
        failed may succeed later, when the slice of another client's sequence is over.
        """
        wait, blocked_at = self.blocked.get(client, (None, 0))
        is_same = self._is_busy and wait is client.queue.first.wait
        lacks_room = is_same and self.cache.num_releases - blocked_at <= len(self.running)
        return lacks_room and not (self.fair.may_try_blocks and self._victim_for_blocks(client) is not None)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence of any status; if a step in flight computes it, `release_after_step` releases its blocks later."""
        if sequence.status is SequenceStatus.WAITING:
            self.in_flight_prefixes.forget_waiter(sequence)
            self.moves.drop_swapped(sequence)
            self.waiting.remove(sequence)
        else:
            self.in_flight_prefixes.stopped_running(sequence)
            if sequence.num_in_flight and sequence.status is not SequenceStatus.PREEMPTING:
                self._num_awaiting_release += 1
            self._stops_running(sequence)
            if not sequence.num_in_flight:
                self._release_finished(sequence)
        client = self.clients.of(sequence)
        self.clients.leave(sequence)
        if not client.num_sequences:
            self.blocked.pop(client, None)
        sequence.move_to(SequenceStatus.FINISHED)
        ticket = sequence.blocks.load.ticket if sequence.blocks is not None else 0
        loads = self.cache.tiers.loads
        # What other sequences wait for is loaded to its end.
        if ticket and loads.by_ticket[ticket] not in self.in_flight_prefixes.waiters_of and loads.cancel(ticket):
            self.loaded(ticket)

    def release_after_step(self, sequence: Sequence) -> None:
        """Release a PREEMPTING or FINISHED sequence, which no step in flight computes any more."""
        self._num_awaiting_release -= 1
        if sequence.status is SequenceStatus.PREEMPTING:
            self.preempt(sequence)
        else:
            self._release_finished(sequence)

    def allocate_or_preempt(self, sequence: Sequence, count: int, *, steps_in_flight: int) -> int:
        """Give a running sequence blocks for its next tokens; preempt others for that if necessary.

        Return for how many tokens, at most `count`, it has blocks now; 0 if it must wait or was preempted itself. Each round of the
        loop preempts one sequence, until the tokens fit.
        """
        while True:
            num_fitting = self._allocate(sequence, count)
            # If a step in flight is about to free blocks, the sequence waits for them rather than preempt another one.
            if num_fitting or self._num_awaiting_release:
                return num_fitting
            victim = self._last_running()
            if victim is sequence and len(self.running) == 1:
                if not (steps_in_flight or self.cache.tiers.others_hold_device):
                    raise RuntimeError(f"{sequence.request.request_id} was admitted as fitting, and does not fit alone")
                return 0  # the sequence waits: the step in flight, or the end of a transfer, frees blocks
            if victim.num_in_flight:
                self._preempt_after_step(victim)
                return 0
            self.preempt(victim)
            if victim is sequence:
                return 0

    def preempt(self, sequence: Sequence, *, may_swap: bool = True) -> None:
        """Return a running sequence to the queue and release its blocks. No step in flight may compute it.

        Its blocks are swapped to the host tier, or it is computed again later ("recompute"). In the second case its whole hash
        blocks stay in the prefix cache; if they are not evicted until then, it computes only the tokens after them.
        """
        blocks = sequence.blocks
        assert blocks is not None
        is_swapped = may_swap and self.moves.swap_out(sequence, blocks)
        if not is_swapped:
            self._work.preempted(sequence, blocks)
        for listener in self.listeners:
            listener.preempted(sequence, mode="swap" if is_swapped else "recompute")
        self._stops_running(sequence)
        self.in_flight_prefixes.stopped_running(sequence)
        if is_swapped:
            self._left_device(sequence, blocks)
        else:
            self._release(sequence, CheckpointKind.PREEMPTED)
        sequence.leave_device(is_swapped=is_swapped)
        sequence.move_to(SequenceStatus.WAITING)
        self.waiting.put(sequence, InQueue(swapped=blocks if is_swapped else None))

    def loaded(self, ticket: int) -> None:
        """End the load with this ticket, which the ranks have reported.

        Its sequence runs from now on; if it was preempted or finished meanwhile, it is released. Sequences that waited for the load
        return to the queue in either case, since searches find its blocks on the device now.
        """
        ended = self.moves.end_load(ticket)
        if ended is None:
            return
        sequence, load = ended
        self.in_flight_prefixes.ended(load)
        if sequence.status is SequenceStatus.RUNNING:
            self.in_flight_prefixes.published(sequence)
        elif not sequence.num_in_flight:  # PREEMPTING or FINISHED
            self.release_after_step(sequence)

    def abandon_loads(self) -> None:
        """Forget all loads, since the ranks were restarted."""
        for load in self.cache.tiers.loads.by_ticket.values():
            self.in_flight_prefixes.ended(load)
        for sequence in self.moves.abandon_loads():
            self.release_after_step(sequence)

    def preempt_all(self) -> None:
        """Preempt every running sequence and empty both tiers, because the contents of the blocks are not known any more.

        No step may be in flight. Sequences that are LOADING are released when the ranks have reported their loads.
        """
        for sequence in list(self.running):
            if sequence.status is SequenceStatus.LOADING:
                self._preempt_after_step(sequence)
            elif sequence.status is SequenceStatus.RUNNING:
                self.preempt(sequence, may_swap=False)
        self.moves.lose_swapped(self.waiting)
        self.cache.evict_all()

    def _last_running(self) -> Sequence:
        """Return the sequence to preempt if a running one lacks blocks; with a single client, the last one in order."""
        last = self.fair.last() if len(self.clients) > 1 else None
        return last or self.running.last

    def _stops_running(self, sequence: Sequence) -> None:
        """Remove a sequence from the running ones, and charge its client for what was computed."""
        self.clients.served(sequence)
        self.running.remove(sequence)

    def _preempt_after_step(self, sequence: Sequence) -> None:
        """Mark a running sequence as PREEMPTING. It is preempted when the step or load in flight that uses its blocks has
        answered."""
        sequence.move_to(SequenceStatus.PREEMPTING)
        self.in_flight_prefixes.stopped_running(sequence)
        self._num_awaiting_release += 1

    def next_client(self, no_share: set[Client], no_room: set[Client]) -> Client | None:
        """Return the client whose first waiting sequence is tried next in this step; None if no client is left to try.

        `no_share` and `no_room` have the clients that were tried in vain: their first sequences get no tokens in this step, or do
        not fit. This method adds clients that are known to be blocked to `no_room`.

        Once a client lacks room, a later client in turn is tried only if it has no running slot, or holds less memory for its
        weight than every client that lacks room. Otherwise a client that holds much would take the blocks that become free, before
        they suffice for the one that holds less. Example: A holds 8 blocks and B 4, and both are blocked. After A, clients that
        hold fewer than 8 blocks are tried; after B, those that hold fewer than 4.
        """
        if len(self.clients) == 1:
            return None if no_share or no_room else next(iter(self.clients.next_waiting()), None)
        most = math.inf  # a client with a running slot is tried only if it holds less than this
        for client in self.clients.next_waiting(MAX_TRIED_CLIENTS):
            if client in no_share or (client.num_slots and no_room and self.fair.held(client) >= most):
                continue
            if client not in no_room and not self.is_blocked(client):
                return client
            no_room.add(client)
            most = min(most, self.fair.held(client))
        return None

    def admit_next(self, client: Client, budget: int) -> tuple[Sequence, int] | None:
        """Admit a client's first waiting sequence, and return it with the number of tokens, at most `budget`, that it starts with.

        0 tokens: the sequence became a waiter, or first loads blocks from the host tier; the next one in the queue may be tried.
        None: it cannot be admitted now.
        """
        sequence = client.queue.first
        if sequence.num_ready <= 0:  # it was preempted at its length limit, and the engine will finish it
            return None
        if self.is_blocked(client):
            return None
        hit = None if sequence.swapped is not None else find_hit(self.cache, sequence)
        if hit is not None and self._becomes_waiter(sequence, hit):
            return sequence, 0
        count = self._admit(sequence, hit, budget)
        if count is None:
            assert sequence.wait is not None
            self.blocked[client] = (sequence.wait, self.cache.num_releases)
            return None
        return sequence, count

    def claim_slot(self, client: Client) -> bool:
        """Preempt a sequence of another client if `fair_preemption` gives its running slot to this client.

        Return whether the slot is free now: not if a step in flight still computes the sequence.
        """
        victim = None if self.is_blocked(client) else self.fair.for_slot(client)
        if victim is None:
            return False
        if isinstance(victim.wait, AwaitsPrefix):  # a waiter holds a slot and no blocks: it just returns to the queue
            self.in_flight_prefixes.stop_waiting(victim)
            return True
        return self._claim(victim)

    def claim_blocks(self, client: Client) -> bool:
        """Preempt a sequence of another client if `fair_preemption` gives its memory to this client; return whether the memory is
        free now."""
        victim = self._victim_for_blocks(client)
        return victim is not None and self._claim(victim)

    def _victim_for_blocks(self, client: Client) -> Sequence | None:
        """Return the sequence that a claim of memory by this client preempts; None if there is none, or a step in flight frees
        blocks."""
        if len(self.clients) == 1 or self._num_awaiting_release:
            return None
        return self.fair.for_blocks(client)

    def _claim(self, victim: Sequence) -> bool:
        """Preempt a sequence now, or when its step in flight has answered; return whether it was preempted now."""
        if victim.status is SequenceStatus.PREEMPTING:
            return False
        if victim.num_in_flight:
            self._preempt_after_step(victim)
            return False
        self.preempt(victim)
        return True

    def begin_step(self) -> None:
        """Count a step that is planned now, and let sequences that have awaited another client's prefix for too long compute it."""
        self.fair.num_steps += 1
        self.in_flight_prefixes.end_long_waits(self.fair.num_steps)

    def before_checkpoint(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence may be computed before its next checkpoint; without recurrent layers all.

        Their state at a boundary is only known if a row ends there.
        """
        if self.cache.state_group is not None and sequence.blocks is not None:
            for boundary, _ in sequence.blocks.planned_checkpoints:
                if boundary * self.cache.block_size > sequence.scheduled:
                    return boundary * self.cache.block_size - sequence.scheduled
        return sequence.max_tokens_total

    def apply_policy(self, sequence: Sequence, history: AttentionHistory) -> None:
        """Take the due decision of a running sequence's KV policy, and remove the blocks that the policy does not keep."""
        blocks = sequence.blocks
        assert blocks is not None
        (table,) = blocks.tables
        leaving = history.decide(table.run_logicals)
        if leaving:
            self.cache.remove(blocks, 0, leaving)

    # Ids of released sequences

    def take_finished_ids(self) -> list[int]:
        """Return the ids that the next plan must name as finished, and forget them."""
        finished_ids, self._finished_ids = self._finished_ids, []
        return finished_ids

    def restore_finished_ids(self, seq_ids: Iterable[int]) -> None:
        """Name these ids in the next plan again: the ranks may not have received the plan that named them."""
        self._finished_ids += seq_ids

    # Admission

    def _becomes_waiter(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Make the sequence a waiter if a running sequence computes a prefix that it lacks, or a load brings blocks that it would
        load too; return whether it became a waiter.

        A running producer will place a checkpoint where the two prompts part, so that the cache keeps the sliding-window blocks
        which the waiter needs there.
        """
        producer: Sequence | Load
        found = self.in_flight_prefixes.producer_for(sequence, hit)
        if found is not None and self.in_flight_prefixes.may_await(sequence, found[0], step=self.fair.num_steps):
            producer, num_hash_blocks = found
            assert producer.blocks is not None
            if not (num_hash_blocks := self._reachable(producer, hit, num_hash_blocks)):
                return False
            self.cache.publishing.plan_fork_checkpoint(producer.blocks, num_hash_blocks)
        elif (shared := self.cache.load_to_share(sequence.chain, hit, sequence.retentions)) is not None:
            producer, num_blocks = shared
            if not self.in_flight_prefixes.is_worth_waiting(sequence, hit, num_blocks):
                return False
            num_hash_blocks = hit.start // self.cache.block_size
        else:
            return False
        self.in_flight_prefixes.wait_for(sequence, producer, num_hash_blocks)
        return True

    def _reachable(self, producer: Sequence, hit: PrefixHit, num_hash_blocks: int) -> int:
        """Return the last of the `num_hash_blocks` boundaries that a waiter shares with its producer at which it can continue; 0 if
        none is worth waiting for.

        With recurrent layers it can only where the producer has planned a checkpoint, or has not been scheduled yet.
        """
        block_size = self.cache.block_size
        if self.cache.state_group is None or num_hash_blocks * block_size > producer.scheduled:
            return num_hash_blocks
        assert producer.blocks is not None
        planned = [at for at, _ in producer.blocks.planned_checkpoints if at <= num_hash_blocks]
        is_worth = planned and planned[-1] * block_size >= hit.start + self.in_flight_prefixes.min_shared_tokens
        return planned[-1] if is_worth else 0

    def _admit(self, sequence: Sequence, hit: PrefixHit | None, budget: int) -> int | None:
        """Start a sequence after its hit and move it to the running ones.

        Return how many tokens it starts with; 0: it loads blocks from the host tier first; None: it does not fit.
        """
        index_version = self.cache.changes.version
        assert isinstance(sequence.wait, InQueue)
        sequence.wait.reserved_tokens = 0
        if sequence.swapped is not None:
            return 0 if self._resume(sequence, sequence.swapped) else None
        # Reference the hit's blocks, and allocate blocks for the first tokens.
        blocks = self.cache.begin(
            sequence.chain,
            sequence.root,
            hit=hit,
            retentions=sequence.retentions,
            keeps_aside=sequence.request.kv_quality,
            sharer=sequence.request.sharer,
        )
        sequence.blocks, sequence.scheduled = blocks, blocks.processed
        sequence.begin_history(block_size=self.cache.block_size)
        boundaries = checkpoint_boundaries(sequence, hit, block_size=self.cache.block_size)
        self.cache.publishing.expect(blocks, boundaries)
        count = min(sequence.num_ready, budget, self.before_checkpoint(sequence))
        if sequence.history is not None:
            count = min(count, sequence.history.next_decision)
        # One block for each running sequence must stay available (`reserve`), or they would soon preempt this one. If no other
        # sequence holds blocks, nothing needs to be reserved, and blocks may be moved together to make the sequence fit.
        if blocks.state is BlocksState.AWAITS_LOAD:
            count, fits = 0, self.cache.start_load(blocks, reserve=len(self.running), compact=not self._is_busy)
        elif self._is_busy:
            fits = self.cache.extend(blocks, sequence.scheduled + count, reserve=len(self.running))
        else:
            count = self._allocate(sequence, count)
            fits = count > 0
        if not fits:
            self.cache.release(blocks, kind=None)
            sequence.leave_device(is_swapped=False)
            return None
        # The sequence runs from here on.
        self.cache.plan_checkpoints(blocks, boundaries, is_new=not sequence.was_admitted)
        self._starts(sequence, blocks, tokens=count_outcome(self.cache, sequence, hit, index_version=index_version))
        return count

    def _resume(self, sequence: Sequence, blocks: SequenceBlocks) -> bool:
        """Move a swapped sequence to the running ones, where it loads its blocks first; return False if it does not fit."""
        if not self.cache.swap_in(blocks, reserve=len(self.running), compact=not self._is_busy):
            return False
        sequence.blocks, sequence.scheduled = blocks, blocks.processed
        self._starts(sequence, blocks, tokens={"hit": 0, "hit_host": blocks.processed})
        return True

    def _starts(self, sequence: Sequence, blocks: SequenceBlocks, *, tokens: Mapping[str, int]) -> None:
        """Move an admitted sequence from the queue to the running ones. A sequence with a load is LOADING first.

        `tokens` counts its tokens by outcome of the hit search, for the listeners.
        """
        self._work.admitted(sequence, blocks)
        sequence.admitted_step = self.fair.num_steps
        self.clients.admitted(sequence)
        self.waiting.remove(sequence)
        self.running.add(sequence)
        sequence.move_to(SequenceStatus.LOADING if blocks.load.ticket else SequenceStatus.RUNNING)
        if blocks.load.ticket:
            self.moves.begin_load(sequence, blocks)
        sequence.seq_id = self._next_seq_id
        self._next_seq_id += 1
        self.in_flight_prefixes.register(sequence)
        for listener in self.listeners:
            listener.admitted(sequence, tokens=tokens)

    def _allocate(self, sequence: Sequence, count: int) -> int:
        """Allocate blocks for `count` more tokens, or for a half, a quarter ... of them until they fit; return how many fit.

        The cache moves blocks together (compaction) only if otherwise not even a single token fits.
        """
        blocks = sequence.blocks
        assert blocks is not None
        while count and not self.cache.extend(blocks, sequence.scheduled + count, compact=count == 1):
            count //= 2
        return count

    # Release

    def _release_finished(self, sequence: Sequence) -> None:
        """Release a finished sequence. If it has output, a checkpoint at its end keeps what the next turn continues from."""
        self._release(sequence, CheckpointKind.GENERATION if sequence.has_output else None)

    def _release(self, sequence: Sequence, kind: CheckpointKind | None) -> None:
        """Release a sequence's blocks, place a checkpoint of this kind at its end (none if `kind` is None), and have the ranks
        forget the sequence."""
        assert sequence.blocks is not None
        self.cache.release(sequence.blocks, kind=kind)
        self._left_device(sequence, sequence.blocks)
        sequence.blocks = None

    def _left_device(self, sequence: Sequence, blocks: SequenceBlocks) -> None:
        """Note that a sequence's blocks on the device were released.

        If the ranks know the sequence, the next plan names it as finished. They do not know one that was only loading.
        """
        self.policy_counts.left(sequence.request, blocks)
        self.blocked.clear()
        if sequence.num_tokens_on_ranks:
            self._finished_ids.append(sequence.seq_id)

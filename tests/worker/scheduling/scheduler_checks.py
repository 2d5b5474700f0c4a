"""Checks what must hold of sequences that wait for a prefix which a running sequence computes or a load brings, after any event;
and of the scheduler's counts: `WorkModel` tells from plans alone why each token is computed."""

from collections import Counter
from dataclasses import dataclass

from tests.worker.kvcache.cache_model import BLOCK
from transom_worker.kvcache.tiers.loads import Load
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.sequence import AwaitsPrefix, Held, InQueue, SequenceStatus
from transom_worker.scheduling.step import StepPlan


def check_waiters(scheduler: Scheduler) -> int:
    """Check that every waiter has a running producer that will publish what it waits for, or a load that the ranks have not
    reported; return the number of waiters.
    """
    admission = scheduler.admission
    prefixes, running = admission.in_flight_prefixes, list(admission.running)
    waiters = list(admission.waiting.awaiting_prefix)
    assert admission.num_running_slots_used <= scheduler.config.max_num_seqs
    assert {id(one) for one in waiters} == {id(one) for those in prefixes.waiters_of.values() for one in those}
    check_places(scheduler)
    for waiter in waiters:
        assert isinstance(waiter.wait, AwaitsPrefix)
        producer, num_needed = waiter.wait.producer, waiter.wait.num_hash_blocks
        assert waiter in prefixes.waiters_of[producer]
        assert waiter.blocks is None
        assert waiter.reads_prefix_cache
        assert scheduler.cache.enable_prefix_caching
        assert num_needed * BLOCK < len(waiter.token_ids)
        if isinstance(producer, Load):
            assert producer in scheduler.cache.tiers.loads.by_ticket.values()
            assert producer.blocks.chain[0] == waiter.chain[0]
            continue
        assert producer in running
        assert producer.status in (SequenceStatus.RUNNING, SequenceStatus.LOADING)
        assert producer.num_in_flight or producer.num_ready > 0
        assert producer.order_key < waiter.order_key
        assert producer.blocks is not None
        assert producer.blocks.processed // BLOCK < num_needed <= len(producer.token_ids) // BLOCK
        assert waiter.chain[:num_needed] == producer.chain[:num_needed]
    assert sum(map(len, prefixes.waiters_of.values())) == len(waiters)
    assert all(prefixes.waiters_of.values())
    for sequence, pending in prefixes.ranges.items():
        assert sequence in running
        assert sequence.status in (SequenceStatus.RUNNING, SequenceStatus.LOADING)
        assert sequence.blocks is not None
        assert pending.begin == max(pending.begin, sequence.blocks.processed // BLOCK) < pending.end
    for digest, sequence in prefixes.producer_by_digest.items():
        pending = prefixes.ranges[sequence]
        assert digest in sequence.chain[pending.begin : pending.end]
    check_loads(scheduler)
    return len(waiters)


def check_places(scheduler: Scheduler) -> None:
    """A WAITING sequence is at one place, the one that its `wait` says; all others run, or a step in flight still uses them."""
    waiting = scheduler.admission.waiting
    places = {InQueue: waiting.queue, AwaitsPrefix: waiting.awaiting_prefix, Held: waiting.held}
    at = {kind: set(map(id, place)) for kind, place in places.items()}
    for sequence in scheduler.by_request.values():
        found = [kind for kind in places if id(sequence) in at[kind]]
        assert found == ([] if sequence.wait is None else [type(sequence.wait)])
        assert bool(found) == (sequence.status is SequenceStatus.WAITING)
    check_clients(scheduler)
    assert len(waiting) == sum(one.wait is not None for one in scheduler.by_request.values())


def check_clients(scheduler: Scheduler) -> None:
    """Every unfinished sequence is its client's, at the same place; those with a queue stand in the order of their turns."""
    admission = scheduler.admission
    clients = {client.name: client for client in admission.clients}
    assert sorted(clients) == sorted({one.request.client for one in scheduler.by_request.values()})
    for name, client in clients.items():
        own = [one for one in scheduler.by_request.values() if one.request.client == name]
        assert client.num_sequences == len(own)
        for mine, everyones in (
            (client.queue, admission.waiting.queue),
            (client.awaiting_prefix, admission.waiting.awaiting_prefix),
            (client.held, admission.waiting.held),
            (client.running, admission.running),
        ):
            assert list(mine) == [one for one in everyones if one.request.client == name]
    turns = list(admission.clients.next_waiting())
    assert {client.name for client in turns} == {client.name for client in clients.values() if client.queue}
    keys = [(client.level, client.service, client.queue.first.order_key) for client in turns]
    assert keys == sorted(keys)


def check_loads(scheduler: Scheduler) -> None:
    """Every block that a load is known to bring is needed in the host tier."""
    loads, host = scheduler.cache.tiers.loads, scheduler.cache.tiers.host
    for load in loads.by_ticket.values():
        for group, digests in enumerate(load.digests):
            sources = {copy.source for copy in load.copies if copy.group == group}
            assert load.is_void or {host.blocks[group][digest] for digest in digests} <= sources


@dataclass
class Seen:
    """One request: tokens that it came with, and below which position everything was once there."""

    num_known: int
    reached: int = 0  # now
    lost_until: int = 0
    computed: int = 0  # since it was let in


class WorkModel:
    """Reads plans in order."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self.thrown_away = 0  # by preemptions of requests that were let in again
        self._seen: dict[str, Seen] = {}
        self._requests: dict[int, str] = {}

    def take(self, plan: StepPlan) -> None:
        """Count one plan."""
        for new in plan.new_sequences:
            self._requests[new.seq_id] = new.request_id
            seen = self._seen.setdefault(new.request_id, Seen(len(new.token_ids)))
            seen.lost_until = max(seen.lost_until, seen.reached)
            self.thrown_away += seen.computed
            seen.computed = 0
        for row, seq_id in enumerate(plan.seq_ids):
            start, end = plan.start[row], plan.start[row] + plan.count[row]
            seen = self._seen[self._requests[seq_id]]
            repair_until = max(bounds[row] for bounds in plan.write_from)
            kinds = Counter(self._phase(position, seen, repair_until) for position in range(start, end))
            seen.reached = max(seen.reached, end, repair_until)
            seen.computed += end - start
            self.tokens += kinds
            self.rows["decode" if set(kinds) == {"decode"} else "prefill"] += 1

    def _phase(self, position: int, seen: Seen, repair_until: int) -> str:
        if position < repair_until:
            return "repair"
        if position < seen.lost_until:
            return "recompute"
        return "prefill" if position < seen.num_known else "decode"

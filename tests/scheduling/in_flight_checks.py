"""What must hold of sequences that wait for units which another computes, after whatever happened."""

from __future__ import annotations

from cache_model import BLOCK

from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.sequence import SequenceStatus


def check_followers(scheduler: Scheduler) -> int:
    """Whoever waits for a unit has a running sequence that will publish it; returns how many wait so."""
    admission = scheduler.admission
    in_flight_prefixes, running = admission.in_flight_prefixes, list(admission.running)
    following = list(in_flight_prefixes.waiters)
    assert admission.num_running_slots_used <= scheduler.config.max_num_seqs
    assert set(following) == set(in_flight_prefixes._producers)
    assert not set(following) & set(admission.waiting)
    for follower in following:
        leader = in_flight_prefixes._producers[follower]
        units = in_flight_prefixes._ranges[leader].waiters[follower]
        assert leader in running
        assert leader.status is SequenceStatus.RUNNING
        assert leader.num_in_flight or leader.num_ready > 0
        assert leader.key < follower.key
        assert follower.status is SequenceStatus.WAITING
        assert follower.blocks is None
        assert leader.blocks is not None
        assert leader.blocks.processed // BLOCK < units <= len(leader.token_ids) // BLOCK
        assert units * BLOCK < len(follower.token_ids)
        assert follower.chain[:units] == leader.chain[:units]
    for sequence, announced in in_flight_prefixes._ranges.items():
        assert sequence in running
        assert sequence.status is SequenceStatus.RUNNING
        assert sequence.blocks is not None
        assert announced.begin == max(announced.begin, sequence.blocks.processed // BLOCK) < announced.end
        assert len(announced.waiters) == sum(leader is sequence for leader in in_flight_prefixes._producers.values())
    for digest, sequence in in_flight_prefixes._computed_by.items():
        announced = in_flight_prefixes._ranges[sequence]
        assert digest in sequence.chain[announced.begin : announced.end]
    return len(following)

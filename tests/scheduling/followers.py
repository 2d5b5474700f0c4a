"""What must hold of sequences that wait for units which another computes, after whatever happened."""

from __future__ import annotations

from cache_model import BLOCK

from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.sequence import State


def check_followers(scheduler: Scheduler) -> int:
    """Whoever waits for a unit has a running sequence that will publish it; returns how many wait so."""
    placement = scheduler._placement
    upcoming, running = placement.upcoming, list(placement.running)
    following = list(upcoming.following)
    assert placement.num_seats_taken <= scheduler.config.max_num_seqs
    assert set(following) == set(upcoming._leaders)
    assert not set(following) & set(placement.waiting)
    for follower in following:
        leader = upcoming._leaders[follower]
        units = upcoming._announced[leader].followers[follower]
        assert leader in running
        assert leader.state is State.RUNNING
        assert leader.num_in_flight or leader.num_ready > 0
        assert leader.key < follower.key
        assert follower.state is State.WAITING
        assert follower.blocks is None
        assert leader.blocks is not None
        assert leader.blocks.processed // BLOCK < units <= len(leader.token_ids) // BLOCK
        assert units * BLOCK < len(follower.token_ids)
        assert follower.chain[:units] == leader.chain[:units]
    for sequence, announced in upcoming._announced.items():
        assert sequence in running
        assert sequence.state is State.RUNNING
        assert sequence.blocks is not None
        assert announced.begin == max(announced.begin, sequence.blocks.processed // BLOCK) < announced.end
        assert len(announced.followers) == sum(leader is sequence for leader in upcoming._leaders.values())
    for digest, sequence in upcoming._computed_by.items():
        announced = upcoming._announced[sequence]
        assert digest in sequence.chain[announced.begin : announced.end]
    return len(following)

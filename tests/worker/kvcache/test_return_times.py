"""Learned return times: which checkpoints a rhythm of returns makes valuable, and that every watch ends."""

from __future__ import annotations

from transom_worker.kvcache.return_times import (
    BUCKET_EDGES,
    LAST_BUCKET,
    CheckpointClass,
    ReturnTimes,
    WatchedCheckpoint,
)

PROMPT = CheckpointClass(kind="prompt", was_built_upon=True, num_returns=0)


def rounds(period: int, *, num_requests: int = 900) -> tuple[ReturnTimes, list[WatchedCheckpoint]]:
    """Sessions that take turns: each checkpoint is returned to after `period` requests; those of the last round not yet."""
    times = ReturnTimes()
    watches: list[WatchedCheckpoint] = []
    for now in range(num_requests):
        times.tick()
        if now >= period:
            times.returned(watches[now - period])
        watches.append(times.watch(PROMPT))
    return times, watches[-period:]


def test_the_checkpoint_that_is_due_next_is_worth_most_in_a_round_robin() -> None:
    times, waiting = rounds(30)
    assert times.worth(waiting[0]) > 2 * times.worth(waiting[-1])


def test_a_checkpoint_that_is_returned_to_at_once_or_never_is_worth_less_by_age() -> None:
    times = ReturnTimes()
    watches = []
    for now in range(900):
        times.tick()
        watches.append(times.watch(PROMPT))
        if now % 2:
            times.returned(watches[-2])
    assert times.worth(watches[-1]) > 2 * times.worth(watches[-39])


def test_a_checkpoint_without_returns_is_forgotten() -> None:
    times = ReturnTimes()
    old = times.watch(PROMPT)
    times.now = BUCKET_EDGES[LAST_BUCKET]
    times.tick()
    assert times.num_watched == 0
    assert times.worth(old) > 0  # by the prior

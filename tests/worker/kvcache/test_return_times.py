"""Learned return times: which checkpoints a rhythm of returns makes valuable, and that every watch ends."""

import hashlib

import pytest
from hypothesis import given, strategies as st

from transom_core.kv_cache.retention_set import RetentionSet
from transom_worker.kvcache.eviction import return_times
from transom_worker.kvcache.eviction.eviction_policy import GHOST_TOKENS, ReturnTimePolicy
from transom_worker.kvcache.eviction.policy_memory import MAX_GHOSTS, MAX_WATCHES, Ghost, Ghosts, WatchRing
from transom_worker.kvcache.eviction.return_times import (
    BUCKET_EDGES,
    LAST_BUCKET,
    REFRESH_EVERY,
    CheckpointClass,
    ReturnTimes,
    WatchedCheckpoint,
)
from transom_worker.kvcache.prefix.digest_table import PLACES
from transom_worker.kvcache.prefix.tree import CheckpointKind, Node

PROMPT = CheckpointClass(kind="prompt", was_built_upon=True, num_returns=0)


def rounds(period: int) -> tuple[ReturnTimes, list[WatchedCheckpoint]]:
    """Sessions that take turns: each checkpoint is returned to after `period` requests; those of the last round not yet."""
    times = ReturnTimes()
    watches: list[WatchedCheckpoint] = []
    for now in range(900):
        times.tick()
        if now >= period:
            times.returned(watches[now - period].number)
        watches.append(times.watch(PROMPT))
    return times, watches[-period:]


def test_the_checkpoint_that_is_due_next_is_worth_most_in_a_round_robin() -> None:
    times, waiting = rounds(30)
    assert times.worth(waiting[0]) > 2 * times.worth(waiting[-1])


def test_a_watch_that_was_dropped_counts_neither_as_returned_nor_as_survived() -> None:
    """Returns alone would make an age that no watch reaches any more look sure."""
    worths = []
    for returns in (False, True):
        times = ReturnTimes(WatchRing(capacity=8))
        old = times.watch(PROMPT)
        for _ in range(40):
            times.tick()
            times.watch(PROMPT)
        assert times.watches.end - times.watches.first == 8
        if returns:
            times.returned(old.number)
            times.forget(old.number)
        worths.append(times.worth(old))
    assert worths[0] == worths[1]


def test_all_that_the_policy_remembers_is_bounded_by_16_mib() -> None:
    watches, ghosts = WatchRing(), Ghosts()
    for number in range(MAX_WATCHES + 10):
        watches.begin(3, number)
    for number in range(MAX_GHOSTS // 8):
        ghosts.remember(digest(number), Ghost(number, 3, number))
    assert watches.num_bytes + ghosts.num_bytes <= 16 * 2**20
    assert watches.end - watches.first == MAX_WATCHES
    assert watches.began_at(watches.first) == 10
    assert watches.class_of_running(watches.end - 1) == 3


def test_the_oldest_ghosts_are_forgotten_first_and_the_newest_of_a_digest_counts() -> None:
    ghosts = Ghosts(capacity=PLACES)  # one set
    for number in range(PLACES):
        ghosts.remember(digest(number), Ghost(number, 1, 1))
    ghosts.remember(digest(2), Ghost(99, 2, 2))
    ghosts.remember(digest(1000), Ghost(1000, 1, 1))
    assert ghosts.pop(digest(0)) is None
    assert ghosts.pop(digest(2)) == Ghost(99, 2, 2)
    assert ghosts.pop(digest(1000)) == Ghost(1000, 1, 1)
    assert len(ghosts) == PLACES - 2


def digest(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def test_a_class_without_observations_learns_from_similar_classes() -> None:
    times = ReturnTimes()
    for _ in range(200):
        new, old = (times.watch(CheckpointClass("prompt", False, num_returns)) for num_returns in (0, 1))
        times.tick()
        times.returned(old.number)
        times.forget(new.number)
    for _ in range(100):
        times.tick()
    unseen = [times.watch(CheckpointClass("system", False, num_returns)) for num_returns in (0, 2)]
    new_worth, old_worth = map(times.worth, unseen)
    assert new_worth < old_worth


def test_checkpoints_that_are_still_in_a_bucket_count_in_its_hazard() -> None:
    """Of 100 checkpoints that have just come into a bucket one is returned to: that is one of a hundred, not one of one."""
    times = ReturnTimes()
    watches = [times.watch(PROMPT) for _ in range(100)]
    for _ in range(BUCKET_EDGES[10]):
        times.tick()
    before = times.worth(watches[0])
    times.returned(watches[0].number)
    for _ in range(REFRESH_EVERY):
        times.tick()
    assert times.worth(times.watch(PROMPT)) < 1.5 * before


@given(st.lists(st.floats(0.0, 1.0), min_size=LAST_BUCKET + 1, max_size=LAST_BUCKET + 1))
def test_the_worth_is_the_best_ratio_over_all_stopping_ages(hazards: list[float]) -> None:
    for start, worth in enumerate(return_times._worths(hazards)):
        still_waiting, expected_wait, expected_returns, best = 1.0, 0.0, 0.0, 0.0
        for bucket in range(start, LAST_BUCKET + 1):
            width = BUCKET_EDGES[bucket + 1] - BUCKET_EDGES[bucket]
            expected_wait += still_waiting * width * (1 - hazards[bucket] / 2)
            expected_returns += still_waiting * hazards[bucket]
            still_waiting *= 1 - hazards[bucket]
            best = max(best, expected_returns / expected_wait)
        assert worth == pytest.approx(best)


def test_missed_part_of_a_segment_counts_as_when_it_was_cached() -> None:
    """A request that shares a quarter of a long segment is a quarter of a return, whether the node is cached or evicted."""
    tables = []
    for evicted in (False, True):
        policy = ReturnTimePolicy(GHOST_TOKENS)  # every hash block becomes a ghost
        node = evictable(400)
        policy.created(node)
        policy.admitted()
        if evicted:
            policy.removed(node)
            ghost = policy.missed([*node.segment[:100], digest(1_000)], 0, 101)
            assert ghost is not None
            assert ghost.num_blocks_before == 300
        else:
            policy.returned_inside(node, 0.25)
        tables.append([table.returned for table in policy._times._tables])
    assert tables[0] == tables[1]
    assert sum(map(sum, tables[0])) == 0.25


def evictable(boundary: int, *, parent: Node | None = None, kind: CheckpointKind = CheckpointKind.PROMPT) -> Node:
    """A node at a boundary; hash block `at` of every chain has `digest(at)`."""
    node = Node(boundary, digest(boundary - 1), parent, kind, RetentionSet())
    node.segment = [digest(at) for at in range(parent.boundary if parent else 0, boundary)]
    return node


@pytest.mark.parametrize("shared", [5, 16, 100, 335, 336, 399, 400])
def test_every_part_of_an_evicted_segment_is_known_to_within_256_tokens(shared: int) -> None:
    policy = ReturnTimePolicy(16)
    above = evictable(3)
    node = evictable(400, parent=above)
    policy.created(node)
    policy.removed(node)
    ghost = policy.missed([*map(digest, range(shared)), *map(digest, range(10_000, 10_000 + shared))], 3, 2 * shared)
    if shared < 16:
        assert ghost is None
    else:
        assert ghost is not None
        assert ghost.parts_at == (shared if shared > 400 - 64 else shared // 16 * 16)


def test_a_node_is_worth_no_less_than_what_was_evicted_below_it() -> None:
    """Prompts are returned to, forks never; with the prompt evicted, who returns to it continues from the fork above."""
    policy = ReturnTimePolicy(16)
    for _ in range(300):
        fork, prompt = evictable(10, kind=CheckpointKind.FORK), evictable(20)
        policy.created(fork)
        policy.created(prompt)
        policy.admitted()
        policy.returned(prompt)
        policy._forget(prompt)
    above = evictable(10, kind=CheckpointKind.FORK)
    below = evictable(20, parent=above)
    policy.created(above)
    policy.created(below)
    alone, worth = policy.rank(above, 100, 1), policy.rank(below, 100, 1)
    assert alone < worth / 2
    policy.removed(below)
    assert policy.rank(above, 100, 1) == worth
    policy.returned(above)
    assert policy.rank(above, 100, 1) < worth / 2

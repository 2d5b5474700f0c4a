"""A mirror follows an index, notices what it missed, and begins again from the whole."""

from __future__ import annotations

import random

import pytest

from transom_cluster.routing.index_mirror import PrefixIndexMirror
from transom_worker.kvcache.change_log import ChangeLog
from transom_worker.kvcache.events import CacheShape, KvRun, KvUpdate
from transom_worker.kvcache.groups import GroupKind, GroupSpec

SHAPE = CacheShape(
    groups=(
        GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=4),
        GroupSpec(name="window", kind=GroupKind.WINDOW, layers=(1,), block_size=4, window=8),
    ),
    block_size=4,
    window_repair=False,
    enable_prefix_caching=True,
)
CHAIN = [bytes([i]) * 32 for i in range(8)]


def update(after: int, *runs: KvRun, whole: bool = False) -> KvUpdate:
    version = after if whole else after + sum(len(run.digests) for run in runs)
    return KvUpdate(after=after, version=version, runs=runs, whole=whole)


def added(group: int, *units: int) -> KvRun:
    return KvRun("added", group, tuple(CHAIN[unit] for unit in units))


def removed(group: int, *units: int) -> KvRun:
    return KvRun("removed", group, tuple(CHAIN[unit] for unit in units))


WHOLE = update(10, added(0, 0, 1, 2), added(1, 1, 2), whole=True)


def test_it_searches_as_the_worker_does() -> None:
    mirror = PrefixIndexMirror(SHAPE)
    assert mirror.apply(WHOLE)
    assert (mirror.version, mirror.num_blocks) == (10, 5)
    assert mirror.find(CHAIN, 33).start == 12
    assert mirror.find(CHAIN, 12).start == 0  # a token is left to compute, and the window of boundary 2 is gone
    assert mirror.apply(update(10, added(0, 3), added(1, 3), removed(1, 1)))
    assert (mirror.version, mirror.num_blocks) == (13, 6)
    assert mirror.find(CHAIN, 33).start == 16
    assert mirror.apply(update(13, removed(0, 0)))
    assert mirror.find(CHAIN, 33).start == 0


def test_updates_before_the_first_whole_index_say_nothing() -> None:
    mirror = PrefixIndexMirror(SHAPE)
    assert mirror.apply(update(7, added(0, 0, 1, 2), added(1, 1, 2)))
    assert (mirror.version, mirror.num_blocks) == (0, 0)


def test_a_gap_is_told_once_and_forgets_everything_until_the_whole_index_comes() -> None:
    mirror = PrefixIndexMirror(SHAPE)
    mirror.apply(WHOLE)
    assert not mirror.apply(update(11, added(0, 4)))
    assert (mirror.version, mirror.num_blocks) == (0, 0)
    assert mirror.find(CHAIN, 33).start == 0
    assert mirror.apply(update(12, added(0, 5)))  # the whole index is on its way
    assert mirror.num_blocks == 0
    assert mirror.apply(WHOLE)
    assert mirror.apply(update(10, added(0, 3)))
    assert mirror.num_blocks == 6


@pytest.mark.parametrize("seed", range(20))
def test_two_mirrors_agree_with_the_index_however_late_they_hear(seed: int) -> None:
    rng = random.Random(seed)
    index: tuple[dict[bytes, int], ...] = ({}, {})
    log = ChangeLog(index)
    log.max_unread = 12
    mirrors = [PrefixIndexMirror(SHAPE), PrefixIndexMirror(SHAPE)]
    for mirror in mirrors:
        assert mirror.apply(log.whole())
    for _ in range(200):
        group = rng.randrange(2)
        digests = rng.sample(CHAIN, rng.randrange(1, 4))
        if new := [digest for digest in digests if digest not in index[group]]:
            index[group].update(dict.fromkeys(new, 0))
            log.add("added", group, new)
        elif digests:
            for digest in digests:
                del index[group][digest]
            log.add("removed", group, digests)
        if rng.random() < 0.2 and (change := log.take()) is not None:
            assert change.whole or sum(len(run.digests) for run in change.runs) <= 12
            for mirror in mirrors:
                if rng.random() < 0.1 and not mirror.apply(KvUpdate(after=-1, version=0, runs=())):
                    assert mirror.apply(log.whole())  # a resync
                else:
                    assert mirror.apply(change)
            assert [mirror.version for mirror in mirrors] == [log.version] * 2
            assert all(mirror.groups == tuple(map(set, index)) for mirror in mirrors)

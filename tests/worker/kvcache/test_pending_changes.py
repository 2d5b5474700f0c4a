"""However many updates are joined, a mirror ends at the index and its version."""

from __future__ import annotations

import random

import pytest

from transom_worker.kvcache.change_log import ChangeLog
from transom_worker.kvcache.events import KvRun, KvUpdate
from transom_worker.kvcache.pending_changes import PendingChanges

DIGESTS = [bytes([i]) * 32 for i in range(8)]


def test_nothing_waits_before_the_whole_index_and_its_changes_follow_in_the_same_update() -> None:
    pending = PendingChanges()
    pending.add(KvUpdate(after=3, version=4, runs=(KvRun("added", 0, (DIGESTS[0],)),)))
    assert pending.is_empty
    assert pending.take() is None
    pending.add(KvUpdate(after=4, version=4, runs=(KvRun("added", 0, (DIGESTS[0],)),), whole=True))
    pending.add(KvUpdate(after=4, version=5, runs=(KvRun("removed", 0, (DIGESTS[0],)),)))
    update = pending.take()
    assert update is not None
    assert (update.whole, update.version) == (True, 5)
    assert [run.action for run in update.runs] == ["added", "removed"]


def test_changes_that_cancel_out_are_left_out_but_their_version_is_not() -> None:
    pending = PendingChanges()
    pending.add(KvUpdate(after=0, version=0, runs=(), whole=True))
    pending.take()
    pending.add(KvUpdate(after=0, version=2, runs=(KvRun("added", 0, tuple(DIGESTS[:2])),)))
    pending.add(KvUpdate(after=2, version=3, runs=(KvRun("removed", 0, (DIGESTS[0],)),)))
    pending.add(KvUpdate(after=3, version=5, runs=(KvRun("added", 1, tuple(DIGESTS[:2])),)))
    runs = (KvRun("added", 0, (DIGESTS[1],)), KvRun("added", 1, tuple(DIGESTS[:2])))
    assert pending.take() == KvUpdate(after=0, version=5, runs=runs)
    pending.add(KvUpdate(after=5, version=6, runs=(KvRun("added", 0, (DIGESTS[5],)),)))
    pending.add(KvUpdate(after=6, version=7, runs=(KvRun("removed", 0, (DIGESTS[5],)),)))
    assert pending.take() == KvUpdate(after=5, version=7, runs=())


@pytest.mark.parametrize("seed", range(20))
def test_mirrors_that_read_at_any_time_follow_the_index(seed: int) -> None:
    """Random changes, whole indexes in between (too many changes, resyncs), two readers at their own pace."""
    rng = random.Random(seed)
    index: tuple[dict[bytes, int], ...] = ({}, {})
    log = ChangeLog(index)
    log.max_unread = 12
    readers = [PendingChanges(), PendingChanges()]
    mirrors: list[list[set[bytes]]] = [[set(), set()], [set(), set()]]
    versions = [0, 0]
    for reader in readers:
        reader.add(log.whole())
    for step in range(300):
        group = rng.randrange(2)
        chosen = rng.sample(DIGESTS, rng.randrange(1, 5))
        new = [digest for digest in chosen if digest not in index[group]]
        if new:
            index[group].update(dict.fromkeys(new, 0))
        else:
            for digest in chosen:
                del index[group][digest]
        log.add("added" if new else "removed", group, new or chosen)
        if rng.random() < 0.3 and (update := log.take()) is not None:
            for reader in readers:
                reader.add(update)
            if rng.random() < 0.1:
                readers[0].add(log.whole())
            for at in range(2):
                if rng.random() < 0.3 or step > 290:
                    versions[at] = apply(readers[at].take(), mirrors[at], versions[at])
                    assert tuple(mirrors[at]) == tuple(map(set, index))
                    assert versions[at] == log.version


def apply(update: KvUpdate | None, mirror: list[set[bytes]], version: int) -> int:
    """Apply an update strictly: it removes only what is there and adds only what is not. Returns the mirror's version."""
    if update is None:
        return version
    if update.whole:
        for found in mirror:
            found.clear()
    else:
        assert update.after == version
    for action, group, digests in update.runs:
        assert len(set(digests)) == len(digests)
        if action == "added":
            assert not mirror[group].intersection(digests)
            mirror[group].update(digests)
        else:
            assert mirror[group].issuperset(digests)
            mirror[group].difference_update(digests)
    return update.version

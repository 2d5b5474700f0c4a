"""However many updates are joined, a mirror ends at the index and its version."""

import random

import pytest

from tests.worker.kvcache.cache_model import Mirror
from transom_core.contract.kv_events import KvRun, KvUpdate
from transom_core.kv_cache.load_rates import LoadRates
from transom_worker.kvcache.prefix.change_log import ChangeLog, PendingChanges

DIGESTS = [bytes([i]) * 32 for i in range(8)]


@pytest.mark.parametrize("seed", range(20))
def test_mirrors_that_read_at_any_time_follow_the_index(seed: int) -> None:
    """Random changes, whole indexes in between (too many changes, resyncs), two readers at their own pace."""
    rng = random.Random(seed)
    index: tuple[tuple[dict[bytes, int], ...], ...] = (({}, {}), ({}, {}))  # by tier and group
    log = ChangeLog(index, LoadRates(1, (1, 1)))
    log.max_unread = 12
    readers = [PendingChanges(), PendingChanges()]
    mirrors = [Mirror(2, num_tiers=2, takes_joined=True), Mirror(2, num_tiers=2, takes_joined=True)]
    for reader in readers:
        reader.add(KvUpdate(after=3, version=4, runs=(KvRun("added", 0, (DIGESTS[0],)),)))
        assert reader.take() is None  # nothing waits before the whole index
        reader.add(log.whole())
    for step in range(300):
        tier, group = rng.randrange(2), rng.randrange(2)
        found = index[tier][group]
        chosen = rng.sample(DIGESTS, rng.randrange(1, 5))
        new = [digest for digest in chosen if digest not in found]
        if new:
            found.update(dict.fromkeys(new, 0))
        else:
            for digest in chosen:
                del found[digest]
        log.add("added" if new else "removed", tier, group, new or chosen)
        if rng.random() < 0.1:
            log.set_rates(LoadRates(rng.randrange(9), (rng.randrange(9), 1)))
        if rng.random() < 0.3 and (update := log.take()) is not None:
            for reader in readers:
                reader.add(update)
            if rng.random() < 0.1:
                readers[0].add(log.whole())
            for at in range(2):
                if rng.random() < 0.3 or step > 290:
                    mirrors[at].apply(readers[at].take())
                    assert mirrors[at].tiers == [[set(found) for found in groups] for groups in index]
                    assert (mirrors[at].version, mirrors[at].rates) == (log.version, log.rates)

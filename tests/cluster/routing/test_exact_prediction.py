"""What a router predicts is what the worker finds, token for token, at equal versions of the index."""

import pytest

from tests.cluster.routing.fleet import Fleet, Search, Worker, predict, run_by_run
from tests.cluster.routing.index_model import keys_of, stored_keys
from tests.how_many import num_examples
from transom_cluster.routing.fleet_index import HOLDERS_PER_WORKER, FleetPrefixIndex, PrefixIndexMirror
from transom_core.contract import HeavyPolicy, WindowPolicy
from transom_core.contract.kv_events import KvUpdate

HYBRIDS = (
    ("full",), ("full", "window"), ("full", "sinks_window"), ("full", "window", "ragged_chunk"),
    ("full", "convolution"), ("full", "snapshot"), ("latent", "compressed16", "window"),
)  # fmt: skip
NUM_REQUESTS = num_examples(daily=100, exhaustive=460)
NUM_COMPARED = NUM_REQUESTS * 20 // 23  # at least, of each mix: some requests are aborted before their first token


def differences(worker: Worker, index: FleetPrefixIndex, mirror: PrefixIndexMirror) -> list[int]:
    """Predicted minus found, the mirror being led through the worker's history and stopped at each search.

    Both in all and in the host tier; the sum of the two distances, so that 0 is exact.
    """
    assert mirror.apply(KvUpdate(after=0, version=0, runs=(), whole=True, rates=worker.first_rates))
    steps = run_by_run(worker.updates, worker.rates)
    found = []
    for search in sorted(worker.searches, key=lambda search: search.version):
        while mirror.version < search.version:
            assert mirror.apply(next(steps))
        assert mirror.version == search.version
        expected = predict(index, mirror, search.request)
        in_all = abs(expected.num_cached_tokens - search.num_cached_tokens)
        found.append(in_all + abs(expected.num_host_tokens - search.num_host_tokens))
    for step in steps:
        assert mirror.apply(step)
    return found


@pytest.mark.parametrize("mix", HYBRIDS, ids="+".join)
def test_prediction_is_exact_at_the_version_of_the_search(mix: tuple[str, ...]) -> None:
    fleet = Fleet(mix, seed=HYBRIDS.index(mix))
    fleet.run(NUM_REQUESTS)
    assert_exact(fleet)
    for worker in fleet.workers:
        assert any(search.num_cached_tokens for search in worker.searches)
        assert any(run.action == "removed" for update in worker.updates for run in update.runs)
    assert sum(len(worker.searches) for worker in fleet.workers) >= NUM_COMPARED
    if len(mix) > 1:
        assert any(worker.num_again for worker in fleet.workers)
        num_repaired = sum(worker.driver.executor.num_repaired for worker in fleet.workers)
        assert (num_repaired > 0) == ("snapshot" not in mix)


@pytest.mark.parametrize(
    "mix",
    [mix if mix in HYBRIDS[1:3] else pytest.param(mix, marks=pytest.mark.exhaustive) for mix in HYBRIDS],
    ids="+".join,
)
def test_prediction_is_exact_with_host_tiers(mix: tuple[str, ...]) -> None:
    fleet = Fleet(mix, seed=20 + HYBRIDS.index(mix), host_pages=(6, 24, 90))
    fleet.run(NUM_REQUESTS)
    assert any(search.num_host_tokens for search in assert_exact(fleet))
    assert sum(len(worker.rates) for worker in fleet.workers) > 1


@pytest.mark.parametrize("host_pages", [(0,), (6, 24, 90)], ids=["device", "host tiers"])
def test_prediction_is_exact_with_kv_policies(host_pages: tuple[int, ...]) -> None:
    narrow, wide = WindowPolicy(sinks=0, window=9), WindowPolicy(sinks=5, window=14)
    fleet = Fleet(
        ("full",), seed=11, policies=(None, narrow, wide, HeavyPolicy(sinks=4, budget=24)), host_pages=host_pages
    )
    fleet.run(NUM_REQUESTS)
    hits = [search for search in assert_exact(fleet) if search.num_host_tokens or host_pages == (0,)]
    assert {search.request.kv_policy for search in hits} == {None, narrow, wide}


def assert_exact(fleet: Fleet) -> list[Search]:
    """Check every search of every worker; return those that found blocks."""
    index = FleetPrefixIndex()
    hits = []
    for worker in fleet.workers:
        mirror = index.join(worker.cache.shape)
        assert set(differences(worker, index, mirror)) == {0}
        assert (mirror.version, mirror.rates) == (worker.cache.changes.version, worker.cache.changes.rates)
        stored = stored_keys(index)
        keys = [stored.get(mirror.holder + tier, set()) for tier in range(HOLDERS_PER_WORKER)]
        assert keys[0] == keys_of([set(group) for group in worker.cache.index.groups])
        assert mirror.num_blocks == sum(map(len, keys))
        hits += [search for search in worker.searches if search.num_cached_tokens]
    return hits

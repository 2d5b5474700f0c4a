"""The fleet's prefix index says of every worker what the worker would find; each mirror in it follows a worker's index, notices
what it missed, and begins again from the whole."""

import random

import pytest

from tests.cluster.routing.index_model import MirrorModel, find_by_tier, keys_of, stored_keys
from tests.how_many import num_examples
from tests.worker.kvcache.cache_model import ENTRY_MIXES, MIXES, spec
from transom_cluster.routing.fleet_index import FleetPrefixIndex, PrefixIndexMirror
from transom_cluster.routing.index_code import COUNT, NUM_PARTS
from transom_cluster.routing.prefix_table import PrefixTable
from transom_core.contract.kv_events import CacheShape, KvRun, KvUpdate
from transom_core.kv_cache import load_rates
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.load_rates import LoadRates

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
BLOCK = 4
NUM_CHANGES = num_examples(daily=40, exhaustive=400)


def update(after: int, *runs: KvRun, whole: bool = False) -> KvUpdate:
    version = after if whole else after + sum(len(run.digests) for run in runs)
    return KvUpdate(after=after, version=version, runs=runs, whole=whole)


def added(group: int, *units: int) -> KvRun:
    return KvRun("added", group, tuple(CHAIN[unit] for unit in units))


def removed(group: int, *units: int) -> KvRun:
    return KvRun("removed", group, tuple(CHAIN[unit] for unit in units))


def shape(mix: tuple[str, ...], *, window_repair: bool, num_tiers: int = 1) -> CacheShape:
    groups = tuple(spec(name, layers=(i, len(mix) + i)) for i, name in enumerate(mix))
    return CacheShape(
        groups=groups,
        block_size=BLOCK,
        window_repair=window_repair,
        enable_prefix_caching=True,
        has_host_tier=num_tiers > 1,
        has_disk_tier=num_tiers > 2,
    )


def num_tiers(of: CacheShape) -> int:
    return 1 + of.has_host_tier + of.has_disk_tier


class RandomFleet:
    """Workers that come, change, lose updates and go; an index of all of them, and a model of each."""

    def __init__(self, shapes: list[CacheShape], seed: int, *, num_workers: int) -> None:
        self.rng = random.Random(seed)
        self.index = FleetPrefixIndex()
        self.models: dict[PrefixIndexMirror, MirrorModel] = {}
        self.num_loads = 0  # hits for which blocks are loaded
        self.num_reads = 0  # hits for which blocks are read from a disk
        self._shapes = shapes
        self._num_workers = num_workers
        digest = self.rng.randbytes
        trunk = [digest(32) for _ in range(20)]
        self.chains = [trunk[: self.rng.randrange(21)] for _ in range(6)]
        self.chains = [[*chain, *(digest(32) for _ in range(40 - len(chain)))] for chain in self.chains]
        for _ in range(num_workers):
            self._join()

    def step(self) -> None:
        rng = self.rng
        mirror, model = rng.choice(list(self.models.items()))
        chance = rng.random()
        if chance < 0.03:
            mirror.leave()
            del self.models[mirror]
            self._join()
        elif chance < 0.06:
            is_known = mirror.version == 0  # a gap is told once, until the whole index comes
            assert mirror.apply(KvUpdate(after=mirror.version + 1, version=0, runs=())) == is_known
            model.forget()
            if rng.random() < 0.8:
                self._apply(mirror, whole=True)
        elif chance < 0.1:
            self._apply(mirror, whole=True)
        elif mirror.version:
            self._apply(mirror, whole=False)

    def check(self) -> None:
        stored = stored_keys(self.index)
        for mirror, model in self.models.items():
            keys = [keys_of(groups) for groups in model.tiers]
            assert [stored.get(mirror.holder + tier, set()) for tier in range(num_tiers(mirror.shape))] == keys
            assert mirror.num_blocks == sum(map(len, keys))
        for _ in range(3):
            chain = self.rng.choice(self.chains)[: self.rng.randrange(41)]
            num_tokens = self.rng.randrange(len(chain) * BLOCK + BLOCK) + 1
            asked = self.rng.sample(list(self.models), self.rng.randrange(1, len(self.models) + 1))
            expected = []
            for mirror in asked:
                hit, rates = self.models[mirror].find(chain, num_tokens), self.models[mirror].rates
                is_loaded = rates is not None and hit.start > hit.device_start and bool(hit.num_loaded)
                load_ns = rates.load_ns(hit.num_loaded) if rates is not None and is_loaded else 0
                load_ns += rates.reading_ns(hit.num_read) if rates is not None and hit.num_read else 0
                self.num_loads += is_loaded
                self.num_reads += bool(hit.num_read)
                expected.append((hit.start, hit.memory_start, hit.device_start, load_ns))
            assert find_by_tier(self.index, asked, chain, num_tokens) == expected

    def _join(self) -> None:
        mirror = self.index.join(self.rng.choice(self._shapes))
        self.models[mirror] = MirrorModel(mirror.shape)
        self._apply(mirror, whole=True)

    def _apply(self, mirror: PrefixIndexMirror, *, whole: bool) -> None:
        model = self.models[mirror]
        runs = tuple(self._run(mirror, whole=whole) for _ in range(self.rng.randrange(1, 8)))
        after = mirror.version
        version = 1 + after + sum(len(run.digests) for run in runs)
        rates = None
        if mirror.shape.has_host_tier and (whole or self.rng.random() < 0.1):
            block_ns, read_ns = (tuple(self.rng.choice((0, 500, 5_000)) for _ in mirror.shape.groups) for _ in range(2))
            has_disk = mirror.shape.has_disk_tier
            rates = LoadRates(self.rng.choice((100, 1_000)), block_ns, read_ns if has_disk else ())
        change = KvUpdate(after=version if whole else after, version=version, runs=runs, whole=whole, rates=rates)
        assert mirror.apply(change)
        model.apply(change)

    def _run(self, mirror: PrefixIndexMirror, *, whole: bool) -> KvRun:
        """Mostly the beginning of a chain, or a piece of it."""
        rng = self.rng
        chain = rng.choice(self.chains)
        begin, end = sorted((rng.choice([0, 0, rng.randrange(41)]), rng.randrange(41)))
        is_added = whole or rng.random() < 0.7
        digests = chain[begin:end] if is_added else chain[begin : begin + rng.randrange(6)]
        tier = rng.randrange(num_tiers(mirror.shape))
        return KvRun("added" if is_added else "removed", rng.randrange(len(mirror.shape.groups)), tuple(digests), tier)


@pytest.mark.parametrize(
    ("mix", "of_tiers"),
    [  # every day one number of tiers for each mix, in turn
        pytest.param(mix, tiers, marks=() if (number - tiers) % 3 == 0 else pytest.mark.exhaustive)
        for number, mix in enumerate([*MIXES, *ENTRY_MIXES])
        for tiers in (1, 2, 3)
    ],
)
@pytest.mark.parametrize("window_repair", [False, True], ids=["no_repair", "repair"])
def test_every_worker_is_searched_as_if_alone(
    mix: tuple[str, ...], *, window_repair: bool, of_tiers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_rates, "LEAST_READ_TOKENS", 2 * BLOCK)
    of_all = shape(mix, window_repair=window_repair, num_tiers=of_tiers)
    fleet = RandomFleet([of_all], seed=len(mix), num_workers=7)
    for _ in range(NUM_CHANGES):
        fleet.step()
        fleet.check()
    assert bool(fleet.num_loads) == (of_tiers > 1)
    assert bool(fleet.num_reads) == (of_tiers > 2)


def test_more_workers_than_a_word_has_bits_of_several_shapes_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_rates, "LEAST_READ_TOKENS", 2 * BLOCK)
    shapes = [
        shape(("full", "window"), window_repair=True, num_tiers=3),
        shape(("full", "window"), window_repair=True, num_tiers=2),
        shape(("full",), window_repair=True),
    ]
    fleet = RandomFleet(shapes, seed=3, num_workers=150)
    for _ in range(NUM_CHANGES // 4):
        for _ in range(20):
            fleet.step()
        fleet.check()
    assert fleet.index._num_holders < 1200  # numbers of workers that left are used again


def size_bytes(table: PrefixTable) -> int:
    """The memory of all arrays."""
    sets = sum(array.nbytes for array in table._of_sets)
    return sets + table.parts.nbytes + sum(slots.nbytes for slots in table._slots)


def num_entries(table: PrefixTable) -> int:
    """The number of blocks that are stored; a block that several holders have counts once."""
    return int(table.parts[:, COUNT].sum())


def test_blocks_of_workers_that_left_are_cleared_with_later_updates() -> None:
    index = FleetPrefixIndex()
    rng = random.Random(0)
    stays, *leave = [index.join(SHAPE) for _ in range(4)]
    for mirror in (stays, *leave):
        own = tuple(rng.randbytes(32) for _ in range(5_000))
        assert mirror.apply(update(1, added(0, *range(8)), KvRun("added", 0, own), whole=True))
    before_bytes = size_bytes(index.table)
    assert num_entries(index.table) == 20_008
    for mirror in leave:
        mirror.leave()
    for _ in range(NUM_PARTS):
        assert stays.apply(update(stays.version, added(1, 0), removed(1, 0)))
    assert num_entries(index.table) == 5_008
    assert size_bytes(index.table) < before_bytes / 2
    assert set(stored_keys(index)) == {stays.holder}
    assert {index.join(SHAPE).holder for _ in leave} == {mirror.holder for mirror in leave}


def test_a_block_takes_at_most_20_bytes_and_one_that_many_have_little_more() -> None:
    index, rng = FleetPrefixIndex(), random.Random(0)
    mirrors = [index.join(SHAPE) for _ in range(10)]
    shared = tuple(rng.randbytes(32) for _ in range(100_000))
    for mirror in mirrors:
        assert mirror.apply(update(1, KvRun("added", 0, shared), whole=True))
    assert size_bytes(index.table) <= 20 * len(shared)
    for mirror in mirrors:
        own = tuple(rng.randbytes(32) for _ in range(50_000))
        assert mirror.apply(KvUpdate(after=mirror.version, version=mirror.version + 1, runs=(KvRun("added", 1, own),)))
    assert num_entries(index.table) == 600_000
    assert size_bytes(index.table) <= 20 * num_entries(index.table)

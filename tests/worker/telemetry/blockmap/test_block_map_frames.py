"""The frames of many random requests say what is in each tier, while blocks move between them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, product

import pytest

from tests.block_map_decoder import ACTIVE, EMPTY, EVICTED, GONE, HELD, LOOSE, REPAIR, Map
from tests.how_many import num_examples
from tests.matrices import some_daily
from tests.prefix_chains import chain_of
from tests.present import present
from tests.worker.scheduling.scheduler_driver import BLOCK, ENTRY_MIXES, MIXES, Driver, layout, request
from tests.worker.scheduling.test_scheduler_random import random_run
from tests.worker.telemetry.blockmap.watch import Watch, check, check_described, check_host, in_host_tier, plain
from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, WindowPolicy
from transom_core.kv_cache.prefix_search import find_hit, hit_limit
from transom_worker.kvcache import cache_snapshot
from transom_worker.kvcache.cache_snapshot import HostGroupChanges, HostSnapshot
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.tiers.exports import BlockExport
from transom_worker.kvcache.tiers.imports import BlockImport
from transom_worker.telemetry.blockmap import host_records
from transom_worker.telemetry.blockmap.describe import describe_block

ALL_MIXES = (*MIXES, *ENTRY_MIXES)
ELSEWHERE = 1000  # the least token of prompts that only imports have, since no rank has their contents


class Others:
    """Other workers: they read prefixes, and send some."""

    def __init__(self, cache: KvCache, rng: random.Random) -> None:
        self.cache = cache
        self.rng = rng
        self.imports: list[BlockImport] = []
        self.exports: list[BlockExport] = []

    def act(self, prefix: Sequence[int]) -> None:
        """Begin or end something."""
        [self.read, self.send, self.end, self.end][self.rng.randrange(4)](prefix)

    def read(self, prefix: Sequence[int]) -> None:
        chain = chain_of(prefix, BLOCK)
        hit = self.cache.find(chain, len(prefix))
        opened = self.cache.tiers.exports.begin(chain, hit) if hit.start else None
        if opened is not None:
            self.exports.append(opened)

    def send(self, prefix: Sequence[int]) -> None:
        chain = chain_of([token + ELSEWHERE for token in prefix], BLOCK)
        found = [set(chain) for _ in self.cache.pools]
        hit = find_hit(self.cache.retentions, found, chain, hit_limit(len(prefix), BLOCK), window_repair=True)
        opened = self.cache.tiers.imports.begin(chain, hit)
        if opened is not None:
            self.imports.append(opened)

    def end(self, prefix: Sequence[int] = ()) -> None:
        for opened in self.imports:
            if self.rng.random() < 0.5:
                self.cache.tiers.imports.publish(opened)
            self.cache.tiers.imports.end(opened)
        for lent in self.exports:
            self.cache.tiers.exports.end(lent)
        self.imports, self.exports = [], []


class Looks:
    """Looks at a driver after random events, beside what other workers read and send. It begins after `begins_after` events.

    `catches_up`: frames have few records, and a look takes as many frames as it needs.
    """

    def __init__(self, rng: random.Random, *, begins_after: int, catches_up: bool) -> None:
        self.rng, self.begins_after, self.catches_up = rng, begins_after, catches_up
        self.watch: Watch | None = None

    def __call__(self, driver: Driver) -> None:
        self.begins_after -= 1
        if self.begins_after > 0:
            return
        if self.watch is None:
            self.watch = Watch(driver.scheduler, lambda: step(driver))
            self.others = Others(driver.scheduler.cache, self.rng)
            self.watch.look()
        rng, cache, is_idle = self.rng, driver.scheduler.cache, not driver.scheduler.has_work
        if rng.random() < 0.2 and driver.requests:
            self.others.act(list(rng.choice([*driver.requests.values()]).prompt_token_ids))
        if rng.random() < 0.01:
            cache.evict_all()
        if is_idle or (cache.tiers.exports.reads_device and rng.random() < 0.3):
            self.others.end()  # else nothing might fit
        if is_idle or rng.random() < 0.6:
            self.look(self.watch, driver, is_idle=is_idle)

    def look(self, watch: Watch, driver: Driver, *, is_idle: bool) -> None:
        watch.look()
        if self.catches_up or is_idle:
            settle(watch)
        check(watch)
        check_host(watch)
        if self.rng.random() < 0.3:
            check_late_watcher(watch, catches_up=self.catches_up)
            check_described(watch, self.rng)
        if is_idle:
            assert watch.map.shown == plain(driver.scheduler)
            assert watch.map.shown_in_host == in_host_tier(driver.scheduler)
            for group, block in watch.map.shown_in_host:  # only checkpoints need host blocks now
                told = describe_block(driver.scheduler, group, block, "host")
                assert len(told["checkpoints"]) == told["references"]


def random_lives(
    mix: tuple[str, ...],
    seed: int,
    *,
    steps_in_flight: int,
    policies: Sequence[KvPolicy | None] = (),
    catches_up: bool = False,
) -> Watch:
    """Watch the random requests of `test_scheduler_random`."""
    rng = random.Random(seed)
    looks = Looks(rng, begins_after=rng.randrange(40), catches_up=catches_up)
    random_run(mix, seed, steps_in_flight=steps_in_flight, has_host=True, policies=policies, after_each=looks)
    return present(looks.watch)


def check_late_watcher(watch: Watch, *, catches_up: bool) -> None:
    """Who comes now sees what the first watcher sees."""
    late = Map(next_sequence=watch.number)
    late.take(watch.encoder.whole(0.0).numbered(watch.number))
    if catches_up:
        settle(watch, late)
    assert (late.shown, late.owners, late.sequences) == (watch.map.shown, watch.map.owners, watch.map.sequences)
    assert late.shown_in_host == watch.map.shown_in_host


def step(driver: Driver) -> None:
    """A step, if there is anything to do."""
    if driver.scheduler.has_work:
        driver.step()


def settle(watch: Watch, late: Map | None = None) -> None:
    """Take frames until all is told; `late` is a watcher whose first frame was the last one."""
    while not watch.encoder.is_settled:
        frame = watch.encoder.again(0.0).numbered(watch.number)
        watch.map.take(frame)
        watch.number += 1
        if late is not None:
            late.next_sequence = watch.map.next_sequence - 1
            late.take(frame)


def check_blocks_of_events(watch: Watch, *kinds: str) -> None:
    """The events of each kind tell of as many blocks as the totals have grown by."""
    for kind in kinds:
        counted = sum(event["count"] for event in watch.map.events if event["kind"] == kind)
        assert counted == watch.map.header["totals"][f"{kind}_blocks"] - watch.before[f"{kind}_blocks"]


@pytest.mark.parametrize(
    ("mix", "steps_in_flight"), some_daily(product(ALL_MIXES, (1, 2)), daily=zip(ALL_MIXES, cycle((1, 2))))
)
def test_frames_say_what_both_tiers_hold(
    mix: tuple[str, ...], steps_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_snapshot, "BLOCKS_PER_COPY", 7)
    for seed in range(num_examples(1, 40)):
        watch = random_lives(mix, seed, steps_in_flight=steps_in_flight)
        check_blocks_of_events(watch, "evicted", "spilled", "loaded", "swapped", "imported", "dropped")
        kinds, totals = [event["kind"] for event in watch.map.events], watch.map.header["totals"]
        for kind, total in (("preempted", "preemptions"), ("repair", "repairs")):
            assert kinds.count(kind) == totals[total] - watch.before[total]


def test_every_state_of_a_block_shows() -> None:
    watches = [random_lives(("full", "window"), seed, steps_in_flight=2) for seed in range(2)]
    assert set().union(*(watch.states for watch in watches)) >= {EMPTY, ACTIVE, REPAIR, LOOSE, HELD, EVICTED}
    assert set().union(*(watch.host_states for watch in watches)) == {GONE, EMPTY, LOOSE, HELD, EVICTED}
    assert set().union(*(watch.needs for watch in watches)) >= {"prompt", "sequence"}


def test_what_does_not_fit_into_a_frame_is_in_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_records, "MAX_RUNS", 2)
    watches = [random_lives(("full", "window"), seed, steps_in_flight=1, catches_up=True) for seed in range(2)]
    assert max(watch.map.most_host_records for watch in watches) == 2


def test_long_runs_are_cut() -> None:
    blocks = 200_000
    pages = layout(("full",), num_pages=1)
    arena = replace(pages, num_pages=-(-blocks // pages.blocks_per_page(0)))
    records = host_records.HostRecords(arena)
    in_use = arena.end_block(arena.num_pages - 1, 0)
    changes = HostGroupChanges(blocks=list(range(in_use)), needs=[1] * in_use, leftover=[False] * in_use)
    records.update(HostSnapshot(free_pages=0, groups=(changes,), moves={}))
    words = records.take_changed().reshape(-1, 2)
    counts = (words[:, 1] >> 16) + 1
    assert (len(words), int(counts.sum())) == (4, in_use)
    assert words[:, 0].tolist() == [0, 65_536, 131_072, 196_608]


def test_a_large_host_tier_is_copied_in_pieces() -> None:
    driver = Driver(layout(("full", "window"), num_pages=20), host_pages=50_000)
    host = driver.scheduler.cache.snapshots.host
    assert host is not None
    pieces = host.pieces
    assert [page for pages in pieces for page in pages] == list(range(50_000))
    for pages in pieces:
        assert sum(len(changes.blocks) for changes in host.copy(pages)) < 1.5 * cache_snapshot.BLOCKS_PER_COPY


def test_what_is_not_there_is_not_described() -> None:
    scheduler = Driver(layout(("full", "window"), num_pages=12), host_pages=60).scheduler
    for group, block in [(-1, 0), (2, 0), (0, -1), (0, 10**9)]:
        for tier in ("device", "host"):
            assert list(describe_block(scheduler, group, block, tier)) == ["error"]
    without = Driver(layout(("full",), num_pages=12)).scheduler
    assert describe_block(without, 0, 0, "host") == {"error": "This worker has no host tier."}


def test_frames_say_what_kv_policies_keep() -> None:
    """Tables with gaps, of requests that are swapped and come back, too."""
    policies = (
        None,
        WindowPolicy(sinks=5, window=7),
        AdaptivePolicy(sinks=4, min_window=4, max_window=32, threshold=0.1),
        HeavyPolicy(sinks=5, budget=48),
    )
    watches = [random_lives(("full",), seed, steps_in_flight=1 + seed % 2, policies=policies) for seed in range(2)]
    assert sum(watch.scheduler.work.preemptions["swap"] for watch in watches) > 0


def test_numbers_beyond_a_byte_are_in_the_records() -> None:
    driver = Driver(layout(("full",), num_pages=800), max_num_seqs=400, max_num_batched_tokens=4096)
    watch = Watch(driver.scheduler)
    driver.add(request("first", range(8), 2))
    while driver.scheduler.has_work:
        driver.step()
    for number in range(300):
        driver.add(request(f"r{number}", [*range(8), 9], 1))
    driver.schedule()
    shown = watch.look().shown
    assert max(block.refs for block in shown.values()) == 300
    assert shown == plain(driver.scheduler)


def test_events_beyond_the_limit_are_counted() -> None:
    driver = Driver(layout(("full",), num_pages=4000), max_num_seqs=400, max_num_batched_tokens=4096)
    watch = Watch(driver.scheduler)
    watch.look()
    for number in range(300):
        driver.add(request(f"r{number}", [number], 1))
    driver.schedule()
    header = watch.look().header
    assert (len(header["events"]), header["dropped_events"]) == (256, 300 - 256)
    assert header["events"][-1]["request"] == "r299"

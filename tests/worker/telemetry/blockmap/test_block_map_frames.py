"""The frames of many random requests have exactly the cache's blocks, whatever happened in between."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.block_map_decoder import ACTIVE, EMPTY, EVICTED, HELD, LOOSE, REPAIR, Map
from tests.lost_windows import lose_windows
from tests.worker.scheduling.scheduler_driver import BLOCK, ENTRY_MIXES, MIXES, Driver, layout, request
from tests.worker.telemetry.blockmap.watch import Watch, check, plain
from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, WindowPolicy
from transom_worker.kvcache.manager import KvCache


def random_lives(
    mix: tuple[str, ...], seed: int, *, steps_in_flight: int, policies: Sequence[KvPolicy | None] = (None,)
) -> Watch:
    rng = random.Random(seed)
    least = KvCache(layout(mix, num_pages=1000), block_size=BLOCK).capacity.worst_case_pages(80)
    driver = Driver(
        layout(mix, num_pages=least + rng.choice([0, 1, 2, 12])),
        steps_in_flight=steps_in_flight,
        max_num_batched_tokens=rng.choice([3, 16, 64]),
        max_model_len=80,
        host_pages=30 if len(policies) > 1 else 0,
        preemption_mode="swap",
    )
    prefixes = [[rng.randrange(50) for _ in range(60)] for _ in range(2)]
    for number, prefix in enumerate(prefixes):
        driver.add(request(f"early{number}", prefix, 9))
    for _ in range(rng.randrange(9)):
        driver.step()
    watch = Watch(driver.scheduler, driver.step)
    waiting = [f"r{i}" for i in range(10)]
    watch.look()
    while waiting or driver.scheduler.has_work:
        if waiting and rng.random() < 0.5:
            name = waiting.pop()
            prompt = rng.choice(prefixes)[: rng.randrange(1, 60)] + [rng.randrange(50) for _ in range(rng.randrange(6))]
            policy = rng.choice(policies)
            is_measured = policy is not None and rng.random() < 0.3
            num_tokens = rng.randrange(1, 20 if policy is None else 60)
            driver.add(
                request(name, prompt[:20] if policy else prompt, num_tokens, kv_policy=policy, kv_quality=is_measured)
            )
        if rng.random() < 0.03 and driver.requests:
            driver.abort(rng.choice(sorted(driver.requests)))
        if rng.random() < 0.08:
            lose_windows(driver.scheduler.cache)
        driver.step()
        if rng.random() < 0.6:
            watch.look()
            check(watch)
            whole = Map(next_sequence=7)
            whole.take(watch.encoder.whole(0.0).numbered(7))
            assert whole.shown == watch.map.shown
            assert (whole.owners, whole.sequences) == (watch.map.owners, watch.map.sequences)
    watch.look()
    watch.settle()
    assert watch.map.shown == plain(driver.scheduler)
    return watch


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("mix", [*MIXES, *ENTRY_MIXES], ids="+".join)
def test_frames_say_what_the_cache_holds(mix: tuple[str, ...], steps_in_flight: int) -> None:
    watches = [random_lives(mix, seed, steps_in_flight=steps_in_flight) for seed in range(4)]
    for watch in watches:
        totals, events = watch.map.header["totals"], watch.map.events
        by_kind = {kind: [e for e in events if e["kind"] == kind] for kind in ("evicted", "preempted", "repair")}
        assert (
            sum(event["count"] for event in by_kind["evicted"])
            == totals["evicted_blocks"] - watch.before["evicted_blocks"]
        )
        assert len(by_kind["preempted"]) == totals["preemptions"] - watch.before["preemptions"]
        assert len(by_kind["repair"]) == totals["repairs"] - watch.before["repairs"]
    states = set().union(*(watch.states for watch in watches))
    assert states >= {EMPTY, ACTIVE, LOOSE, HELD, EVICTED}
    if mix == ("full", "window"):
        assert REPAIR in states


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_frames_say_what_kv_policies_keep(steps_in_flight: int) -> None:
    """Tables with gaps, of requests that are swapped and come back, too."""
    policies = (
        None,
        WindowPolicy(sinks=5, window=7),
        AdaptivePolicy(sinks=4, min_window=4, max_window=32, threshold=0.1),
        HeavyPolicy(sinks=5, budget=48),
    )
    watches = [random_lives(("full",), seed, steps_in_flight=steps_in_flight, policies=policies) for seed in range(4)]
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

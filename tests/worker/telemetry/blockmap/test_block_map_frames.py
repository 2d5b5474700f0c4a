"""The frames of many random requests have exactly the cache's blocks."""

from __future__ import annotations

import pytest

from tests.block_map_decoder import ACTIVE, EMPTY, EVICTED, HELD, LOOSE, REPAIR
from tests.how_many import num_examples
from tests.worker.scheduling.scheduler_driver import ENTRY_MIXES, MIXES, Driver, layout, request
from tests.worker.telemetry.blockmap.test_block_map_host import random_lives
from tests.worker.telemetry.blockmap.watch import Watch, plain
from transom_core.contract import AdaptivePolicy, HeavyPolicy, WindowPolicy


@pytest.mark.parametrize("mix", [*MIXES, *ENTRY_MIXES], ids="+".join)
def test_frames_say_what_the_cache_holds(mix: tuple[str, ...]) -> None:
    watches = [
        random_lives(mix, seed, steps_in_flight=1 + seed % 2, has_host=False) for seed in range(num_examples(2, 8))
    ]
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


def test_frames_say_what_kv_policies_keep() -> None:
    """Tables with gaps, of requests that are swapped and come back, too."""
    policies = (
        None,
        WindowPolicy(sinks=5, window=7),
        AdaptivePolicy(sinks=4, min_window=4, max_window=32, threshold=0.1),
        HeavyPolicy(sinks=5, budget=48),
    )
    watches = [random_lives(("full",), seed, steps_in_flight=1 + seed % 2, policies=policies) for seed in range(4)]
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

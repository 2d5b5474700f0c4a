"""Window repair in plans: what a repair reads and writes, what it tells the client, and that it is done once."""

from __future__ import annotations

from tests.lost_windows import lose_windows
from tests.worker.scheduling.scheduler_driver import Driver, layout, request


def test_full_groups_are_read_and_windows_written_below_the_end() -> None:
    """Two layers per group, in turns, blocks of 4. A prompt of 61 tokens whose windows are lost goes on at n = 60.

    With a window of 10, block 12 is the first live one; from 48 down one layer: 48 - 9 = 39, so the repair starts at 36.
    """
    driver = Driver(layout(("full", "window"), num_pages=200), max_num_batched_tokens=16)
    driver.add(request("cold", range(61), 2))
    driver.run()
    lose_windows(driver.scheduler.cache)
    driver.add(request("repaired", range(61), 2))
    plans = []
    while (plan := driver.schedule()) is not None:
        plans.append(plan)
        driver.receive()
        driver.check()
    first, second, third = plans
    assert (first.start, first.count) == ([36], [16])
    assert (first.write_from, first.attend_from) == ([[60], [36]], [[0], [36]])
    assert (second.start, second.count, second.sample) == ([52], [9], [1])  # crosses n
    assert (second.write_from, second.attend_from) == ([[60], [52]], [[0], [36]])
    assert (third.write_from, third.attend_from) == ([[61], [61]], [[0], [0]])
    assert driver.outputs["repaired"][0].num_cached_tokens == 36
    assert driver.scheduler.stats().outcome_tokens["repaired"] == 24
    driver.add(request("again", range(61), 2))
    plan = driver.schedule()
    assert plan is not None
    assert plan.start == [60]
    driver.receive()
    driver.run()
    assert driver.executor.num_repaired == 24

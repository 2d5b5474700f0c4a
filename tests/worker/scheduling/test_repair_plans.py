"""Window repair in plans: what a replay reads and writes, what it tells the client, and that a preemption starts it again."""

from __future__ import annotations

import pytest

from tests.lost_windows import lose_windows
from tests.worker.scheduling.scheduler_driver import BLOCK, Driver, layout, request
from transom_worker.scheduling.step import StepPlan

# Per group two layers, in turns. Blocks of 4; a prompt of 61 tokens whose windows are lost goes on at n = 60.
# window 10: block 12 is the first live one; from 48 down one layer: 48 - 9 = 39, so s = 36


def with_lost_windows(*mix: str, prompt: int = 61, **config: object) -> Driver:
    driver = Driver(layout(mix, num_pages=200), **config)  # type: ignore[arg-type]
    driver.add(request("cold", range(prompt), 2))
    driver.run()
    lose_windows(driver.scheduler.cache)
    return driver


def plans_of(driver: Driver, name: str, prompt: int) -> list[StepPlan]:
    driver.add(request(name, range(prompt), 2))
    plans = []
    while driver.scheduler.has_work:
        plan = driver.schedule()
        assert plan is not None
        plans.append(plan)
        driver.receive()
        driver.check()
    return plans


def test_full_groups_are_read_and_windows_written_below_the_end() -> None:
    driver = with_lost_windows("full", "window", max_num_batched_tokens=16)
    first, second, third = plans_of(driver, "repaired", 61)
    assert (first.start, first.count) == ([36], [16])
    assert (first.write_from, first.attend_from) == ([[60], [36]], [[0], [36]])
    assert (second.start, second.count, second.sample) == ([52], [9], [1])  # crosses n
    assert (second.write_from, second.attend_from) == ([[60], [52]], [[0], [36]])
    assert (third.write_from, third.attend_from) == ([[61], [61]], [[0], [0]])
    assert driver.outputs["repaired"][0].num_cached_tokens == 36
    assert driver.scheduler.stats().outcome_tokens["repaired"] == 24


def test_sink_blocks_are_read_too() -> None:
    driver = with_lost_windows("full", "sinks_window", "window", prompt=41, max_num_batched_tokens=64)
    (first, _) = plans_of(driver, "repaired", 41)
    assert first.start == [4]  # inside the pinned blocks
    assert (first.write_from, first.attend_from) == ([[40], [8], [4]], [[0], [4], [4]])


def test_what_a_replay_restored_is_hit_without_one() -> None:
    driver = with_lost_windows("full", "window")
    plans_of(driver, "repaired", 61)
    plans = plans_of(driver, "again", 61)
    assert plans[0].start == [60]
    assert driver.executor.num_repaired == 24


def test_a_chunks_start_needs_no_replay_and_its_middle_one() -> None:
    driver = with_lost_windows("full", "chunk")
    assert plans_of(driver, "start", 61)[0].start == [60]
    lose_windows(driver.scheduler.cache)
    plan = plans_of(driver, "middle", 57)[0]
    assert (plan.start, plan.write_from) == ([48], [[56], [48]])


def test_repair_can_be_switched_off() -> None:
    driver = with_lost_windows("full", "window", window_repair=False)
    assert plans_of(driver, "cold again", 61)[0].start == [0]
    assert "repaired" not in driver.scheduler.stats().outcome_tokens


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_preempted_repair_starts_again(steps_in_flight: int) -> None:
    driver = with_lost_windows("full", "window", max_num_batched_tokens=5, steps_in_flight=steps_in_flight)
    driver.add(request("repaired", range(61), 3))
    for _ in range(3):
        driver.step()
    sequence = driver.scheduler.by_request["repaired"]
    while driver.in_flight:
        driver.receive()
    assert sequence.blocks is not None
    assert 36 < sequence.blocks.processed < 60
    driver.scheduler.admission.preempt(sequence)
    driver.check()
    plan = driver.schedule()
    assert plan is not None
    assert (plan.start, plan.attend_from[1]) == ([36], [36])
    driver.run()
    assert len(driver.tokens["repaired"]) == 3


def test_prompts_that_share_a_repaired_prefix_repair_it_beside_each_other() -> None:
    driver = with_lost_windows("full", "window", "ragged_chunk", max_num_batched_tokens=24)
    for name in "abc":
        driver.add(request(name, [*range(60), ord(name), *range(BLOCK)], 4))
    driver.run()
    assert driver.executor.num_repaired >= 3 * 20
    driver.check_idle()

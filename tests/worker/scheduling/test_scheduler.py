"""Single behaviours of the scheduler; random requests are in `test_scheduler_random`."""

from __future__ import annotations

import pytest

from tests.lost_windows import lose_windows
from tests.worker.scheduling.scheduler_driver import BLOCK, Driver, layout, request
from transom_worker.scheduling.sequence import SequenceStatus
from transom_worker.scheduling.step_budget import StepBudget, chunk_limit


def roomy(*mix: str, **config: object) -> Driver:
    return Driver(layout(mix or ("full", "window"), num_pages=200), **config)  # type: ignore[arg-type]


def test_long_prompts_are_chunked_beside_decoding_sequences() -> None:
    driver = roomy(max_num_batched_tokens=16)
    driver.add(request("short", range(3), 20))
    driver.step()
    driver.add(request("long", range(50), 2))
    plan = driver.schedule()
    assert plan is not None
    assert (plan.count, plan.sample) == ([1, 15], [1, 0])
    assert plan.logits_from == [3, 15]  # none of the long one's rows
    driver.receive()
    plan = driver.schedule()
    assert plan is not None
    assert (plan.start, plan.count) == ([4, 15], [1, 15])


def test_an_urgent_long_prompt_leaves_a_token_for_those_behind_it() -> None:
    driver = roomy(max_num_batched_tokens=16, policy="priority")
    driver.add(request("short", range(3), 20, priority=1))
    driver.step()
    driver.add(request("long", range(80), 2, priority=0))
    driver.step()
    plan = driver.schedule()
    assert plan is not None
    assert plan.count == [15, 1]
    driver.receive()
    driver.run()


def test_copies_that_may_not_have_run_leave_no_cache_behind() -> None:
    driver = roomy()
    driver.add(request("before", range(30), 2))
    driver.run()
    driver.add(request("a", range(12), 20))
    plan = driver.schedule()
    assert plan is not None
    plan.copy_group, plan.copy_source, plan.copy_target = [0], [0], [50]  # as if compaction had moved a block
    plan.copy_ticket = [0]
    plan.copy_source_tier, plan.copy_target_tier = [0], [0]
    driver.fail()
    assert driver.finished == ["before", "a"]
    stats = driver.scheduler.stats()
    assert stats.free_pages == stats.num_pages


def test_a_status_changes_as_the_table_allows() -> None:
    driver = roomy()
    driver.add(request("a", range(8), 1))
    with pytest.raises(AssertionError, match=r"a: .*WAITING -> .*PREEMPTING"):
        driver.scheduler.by_request["a"].move_to(SequenceStatus.PREEMPTING)


def test_one_chunk_takes_a_bounded_part_of_the_pool() -> None:
    layout_ = layout(["full", "window"], num_pages=200)  # 4,096 bytes a page, 768 a window block
    assert chunk_limit(layout_, BLOCK) == 200 * 4096 // 16 // 768 * BLOCK
    assert chunk_limit(layout(["full"], num_pages=200), BLOCK) is None
    assert chunk_limit(layout(["full", "window"], num_pages=1), BLOCK) == BLOCK
    assert StepBudget(1000, block_size=BLOCK, max_chunk=40).for_new == 40


def test_as_many_fit_as_are_admitted() -> None:
    driver = Driver(layout(["full", "window"], num_pages=9), max_num_seqs=64, max_num_batched_tokens=1024)
    cache = driver.scheduler.cache
    for num_tokens in (2, BLOCK, 40, 96):
        most = cache.capacity.num_that_fit(num_tokens)
        needs = [retention.peak_blocks(num_tokens - 1) for retention in cache.retentions]
        assert cache.allocator.pages_needed([most * need for need in needs]) is not None
        assert cache.allocator.pages_needed([(most + 1) * need for need in needs]) is None
    empty = cache.capacity.num_that_fit(BLOCK)
    driver.add(request("a", range(30), 2))
    driver.schedule()
    assert 0 < cache.capacity.num_that_fit(BLOCK) < empty
    driver.run()
    assert cache.capacity.num_that_fit(BLOCK) == empty  # what is cached can be evicted
    driver.check_idle()


def test_a_window_repair_reads_full_groups_and_writes_windows_below_its_end() -> None:
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

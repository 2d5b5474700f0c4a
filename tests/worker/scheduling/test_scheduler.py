"""Single behaviours of the scheduler; random requests are in `test_scheduler_random`."""

from __future__ import annotations

import pytest

from tests.worker.scheduling.scheduler_driver import MIXES, Driver, layout, request
from transom_worker.scheduling.step import NO_ID


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


def test_two_steps_in_flight_take_the_token_from_the_row_before() -> None:
    driver = roomy(steps_in_flight=2)
    driver.add(request("a", range(3), 5))
    driver.add(request("b", range(4), 5))
    first, second, third = driver.schedule(), driver.schedule(), driver.schedule()
    assert first is not None
    assert second is not None
    assert third is None
    assert (first.input_id, first.input_row) == ([NO_ID, NO_ID], [NO_ID, NO_ID])
    assert (second.input_id, second.input_row) == ([NO_ID, NO_ID], [0, 1])
    driver.receive()
    driver.run()
    assert [len(driver.tokens[name]) for name in "ab"] == [5, 5]


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_second_request_hits_and_says_so(mix: tuple[str, ...]) -> None:
    driver = roomy(*mix)
    driver.add(request("a", range(40), 2))
    driver.run()
    driver.add(request("b", range(40), 2))
    driver.add(request("salted", range(40), 2, cache_salt="tenant"))
    driver.run()
    cached = {name: driver.outputs[name][0].num_cached_tokens for name in driver.outputs}
    assert cached == {"a": 0, "b": 36, "salted": 0}
    assert driver.scheduler.stats().outcome_tokens == {
        "hit": 36,
        "missed_never_seen": 72,
        "missed_last_token": 12,
    }


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

"""Single behaviours of the scheduler; random requests are in `test_scheduler_random`."""

from __future__ import annotations

import pytest

from tests.worker.scheduling.scheduler_driver import MIXES, Driver, layout, request
from transom_core.contract import LogprobTable, SamplingParams
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


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_an_abort_in_flight_frees_only_with_the_result(steps_in_flight: int) -> None:
    driver = roomy(steps_in_flight=steps_in_flight, caching=False)
    driver.add(request("a", range(12), 30))
    for _ in range(3):
        driver.step()
    while driver.schedule() is not None:
        pass
    driver.abort("a")
    assert driver.scheduler.stats().groups[0].active_blocks > 0
    while driver.in_flight:
        driver.receive()
    driver.check_idle()
    driver.add(request("b", range(3), 2))
    plan = driver.schedule()
    assert plan is not None
    assert plan.finished == [0]  # ranks forget it with the next plan
    assert not driver.scheduler.abort("a")


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


def test_prompt_logprobs_read_no_cache_and_come_once_in_order() -> None:
    driver = roomy(max_num_batched_tokens=7)
    driver.add(request("a", range(20), 2))
    driver.run()
    params = SamplingParams(max_tokens=3, prompt_logprobs=2)
    driver.add(request("b", range(20), params=params))
    driver.add(request("one", [5], params=params))
    driver.run()
    first, *rest = driver.outputs["b"]
    assert first.num_cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert [entry.chosen.token_id for entry in first.prompt_logprobs] == list(range(1, 20))
    assert all(output.prompt_logprobs is None for output in rest)
    assert driver.outputs["one"][0].prompt_logprobs == LogprobTable(1)
    assert driver.scheduler.stats().outcome_tokens["missed_policy"] == 21


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_failed_step_takes_its_requests_and_no_more(steps_in_flight: int) -> None:
    driver = roomy(steps_in_flight=steps_in_flight, max_num_seqs=2)
    for name in "abc":
        driver.add(request(name, range(12), 30))
    driver.step()
    while driver.schedule() is not None:
        pass
    driver.abort("b")
    assert driver.scheduler.fail_in_flight() == ["a"]
    assert not driver.scheduler.steps_in_flight
    assert driver.scheduler.stats().groups[0].active_blocks == 0
    plan = driver.scheduler.schedule()
    assert plan is not None
    assert {0, 1} <= set(plan.finished)
    assert [new.request_id for new in plan.new_sequences] == ["c"]


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

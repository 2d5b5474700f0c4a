"""Requests that load a hit from the host tier: others run on, and aborts, failures and restarts leave both tiers sound."""

from __future__ import annotations

import pytest

from tests.worker.scheduling.scheduler_driver import Driver, layout, request
from transom_worker.scheduling.sequence import SequenceStatus
from transom_worker.scheduling.step import StepPlan

LATER = 1_000


def spilled_driver(*, steps_in_flight: int = 1) -> Driver:
    """A pool of 20 blocks, from which request "a" was evicted by others to the host tier; loads take long while others run."""
    driver = Driver(
        layout(["full"], num_pages=5),
        host_pages=60,
        max_num_batched_tokens=64,
        steps_in_flight=steps_in_flight,
        load_after=lambda: LATER,
    )
    for name in ("a", "b", "c"):
        driver.add(request(name, [ord(name)] * 40, 2))
        driver.run()
    return driver


def loads(plan: StepPlan) -> list[tuple[int, int, int]]:
    columns = zip(plan.copy_group, plan.copy_source, plan.copy_target, plan.copy_ticket, strict=True)
    return [(group, source, target) for group, source, target, ticket in columns if ticket]


def load_beside_another(driver: Driver) -> None:
    """Request "other" runs, then "again" hits what the host tier has."""
    driver.add(request("other", [7] * 3, 20))
    driver.step()
    driver.add(request("again", [ord("a")] * 40, 2))
    driver.step()
    assert driver.scheduler.by_request["again"].status is SequenceStatus.LOADING


def test_others_run_on_while_a_request_loads() -> None:
    driver = spilled_driver()
    load_beside_another(driver)
    before = len(driver.tokens["other"])
    for _ in range(10):
        driver.step()
    assert len(driver.tokens["other"]) == before + 10
    assert not driver.tokens["again"]
    driver.run()  # when nothing else is to be computed, the ranks are asked for the load
    assert driver.outputs["again"][0].num_cached_tokens == driver.outputs["again"][0].num_host_tokens == 36
    driver.check_idle()


def test_an_aborted_load_is_released_when_the_ranks_have_done_it() -> None:
    driver = spilled_driver()
    load_beside_another(driver)
    driver.abort("again")
    driver.check()
    assert driver.scheduler.admission.moves.is_loading
    driver.run()
    assert not driver.scheduler.admission.moves.is_loading
    driver.check_idle()


def test_loads_of_interrupted_plans_are_sent_again() -> None:
    driver = spilled_driver(steps_in_flight=2)
    driver.add(request("again", [ord("a")] * 40, 2))
    plan = driver.schedule()
    assert plan is not None
    assert not plan.seq_ids
    driver.fail()
    driver.check()
    sent = driver.schedule()
    assert sent is not None
    assert loads(sent) == loads(plan) != []
    assert max(sent.copy_ticket) > max(plan.copy_ticket)
    driver.run()
    driver.check_idle()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_plans_copied_stays_when_one_runs_out_of_memory(steps_in_flight: int) -> None:
    """Ranks make the copies of every plan: nothing is loaded twice, nothing cached is lost, and swapped requests come back."""
    driver = spilled_driver(steps_in_flight=steps_in_flight)
    driver.add(request("spills", range(60), 2))
    plan = driver.schedule()
    assert plan is not None
    assert 0 in plan.copy_ticket
    cached = [set(group) for tier in driver.scheduler.cache.index.tiers for group in tier]
    driver.run_out_of_memory()
    assert cached == [set(group) for tier in driver.scheduler.cache.index.tiers for group in tier]
    driver.check()
    driver.run()
    for name in ("a", "b"):
        driver.add(request(f"again {name}", [ord(name)] * 40, 2))
        driver.run()
        assert driver.outputs[f"again {name}"][0].num_cached_tokens == 36
    driver.check_idle()


def test_a_load_is_made_though_its_plan_ran_out_of_memory() -> None:
    driver = spilled_driver(steps_in_flight=2)
    load_beside_another(driver)
    (load,) = driver.scheduler.cache.tiers.loads.by_ticket.values()
    ticket = load.blocks.load.ticket
    driver.schedule()
    driver.run_out_of_memory()
    assert driver.scheduler.by_request["again"].status is SequenceStatus.LOADING
    assert load.blocks.load.ticket == ticket
    driver.run()
    assert driver.outputs["again"][0].num_host_tokens == 36
    driver.check_idle()


def test_a_request_whose_first_step_runs_out_of_memory_is_not_swapped() -> None:
    """It has computed nothing: a load without copies would never end."""
    driver = Driver(layout(["full"], num_pages=5), host_pages=60, preemption_mode="swap")
    driver.add(request("first", [7] * 10, 2))
    driver.schedule()
    driver.run_out_of_memory()
    assert driver.scheduler.work.preemptions == {"recompute": 1, "swap": 0}
    driver.run(max_steps=100)
    driver.check_idle()


def test_what_a_load_brings_is_not_found_if_the_tiers_were_emptied_meanwhile() -> None:
    """The copies to the host may have been in a plan that failed. The loading request computes its whole prompt."""
    driver = spilled_driver()
    load_beside_another(driver)
    driver.scheduler.admission.preempt_all()
    driver.abort("other")
    sequence = driver.scheduler.by_request["again"]
    while sequence.status is not SequenceStatus.RUNNING:
        driver.step()
    assert sequence.num_found_at_admission == 0
    driver.run()
    driver.check_idle()


def test_what_is_in_use_when_the_tiers_are_emptied_is_not_found() -> None:
    driver = spilled_driver()
    driver.add(request("other", [7] * 30, 20))
    driver.step()
    assert any(driver.scheduler.cache.index.groups)
    driver.scheduler.cache.evict_all()
    assert not any(driver.scheduler.cache.index.groups)
    driver.check()
    driver.run()
    driver.check_idle()


def test_a_restart_forgets_loads_and_swapped_requests() -> None:
    driver = spilled_driver()
    load_beside_another(driver)
    driver.in_flight.clear()
    driver.scheduler.reset()
    scheduler = driver.scheduler
    assert not scheduler.has_work
    stats = scheduler.stats()
    assert (stats.free_pages, stats.host_free_pages) == (stats.num_pages, stats.host_pages)


def test_a_small_device_moves_no_more_to_the_host_than_it_must() -> None:
    """The pool has 320 blocks; what is demoted beyond the need would stay empty."""
    driver = Driver(layout(["full"], num_pages=80), host_pages=160, max_model_len=1_300, max_num_batched_tokens=64)
    driver.add(request("long", [number % 50 for number in range(1_200)], 2))
    driver.run()
    driver.add(request("short", [7] * 100, 2))
    driver.run()
    stats = driver.scheduler.stats()
    assert 25 + 300 - 320 <= stats.host_groups[0].spilled_blocks <= 2 * 16
    driver.check_idle()

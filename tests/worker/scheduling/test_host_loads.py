"""Requests that load a hit from the host tier: others run on, and aborts, failures and restarts leave both tiers sound."""

from __future__ import annotations

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
    assert driver.scheduler.admission.is_loading
    driver.run()
    assert not driver.scheduler.admission.is_loading
    driver.check_idle()


def test_loads_of_forgotten_plans_are_sent_again() -> None:
    driver = spilled_driver(steps_in_flight=2)
    driver.add(request("again", [ord("a")] * 40, 2))
    plan = driver.schedule()
    assert plan is not None
    assert not plan.seq_ids
    assert driver.scheduler.ran_out_of_memory() is None  # no row asked for memory
    driver.in_flight.clear()
    driver.executor.fail()
    driver.scheduler.compute_again()
    driver.check()
    sent = driver.schedule()
    assert sent is not None
    assert loads(sent) == loads(plan) != []
    assert max(sent.copy_ticket) > max(plan.copy_ticket)
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

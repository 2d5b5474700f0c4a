"""Requests that load a hit from the host tier: others run on, and aborts, failures and restarts leave both tiers sound."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.scheduling.scheduler_driver import Driver, layout, request
from transom_worker.scheduling.sequence import SequenceStatus

LATER = 1_000


def spilled_driver(**config: Any) -> Driver:
    """A pool of 20 blocks, from which request "a" was evicted by others to the host tier; loads take long while others run."""
    driver = Driver(
        layout(["full"], num_pages=5),
        host_pages=60,
        max_num_batched_tokens=64,
        load_after=lambda: LATER,
        **config,
    )
    for name in ("a", "b", "c"):
        driver.add(request(name, [ord(name)] * 40, 2))
        driver.run()
    return driver


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


@pytest.mark.usefixtures("one_block_in_flight")
def test_what_a_request_that_has_ended_would_load_is_not_loaded() -> None:
    """What is in flight is of the first load, whose blocks are free when it is reported."""
    driver = spilled_driver()
    for name in ("d", "e", "f"):
        driver.add(request(name, [ord(name)] * 40, 2))
        driver.run()
    load_beside_another(driver)
    cache = driver.scheduler.cache
    driver.add(request("later", [ord("b")] * 24, 2))
    driver.step()
    assert driver.scheduler.by_request["later"].status is SequenceStatus.LOADING
    blocks = driver.scheduler.by_request["later"].blocks
    assert blocks is not None
    assert cache.copies.loads.progress(blocks.load.ticket) is None
    for name, num_loads in (("later", 1), ("again", 1)):
        driver.abort(name)
        assert len(cache.tiers.loads.by_ticket) == num_loads
    driver.run()
    assert not cache.tiers.loads.by_ticket
    driver.add(request("anew", [ord("a")] * 40, 2))
    driver.run()
    assert driver.outputs["anew"][0].num_host_tokens == 36
    assert (
        sum(cache.tiers.loads.num_loaded) == driver.executor.num_loaded
    )  # blocks that were never sent are not counted
    driver.check_idle()


@pytest.mark.usefixtures("one_block_in_flight")
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_what_a_preempted_request_that_ends_would_load_is_not_published(mode: str) -> None:
    """It has output, so the blocks up to its end would be cached; a later request reads what the model says, or computes it."""
    driver = spilled_driver(preemption_mode=mode, policy="priority", max_num_seqs=1)
    driver.add(request("first", [9] * 40, 20))
    while len(driver.tokens["first"]) < 6:
        driver.step()
    driver.scheduler.admission.preempt(driver.scheduler.by_request["first"])
    for name in ("d", "e"):
        driver.add(request(name, [ord(name)] * 70, 2, priority=-1))
    while driver.scheduler.by_request["first"].status is not SequenceStatus.LOADING:
        driver.step()
    driver.abort("first")
    (load,) = driver.scheduler.cache.tiers.loads.by_ticket.values()
    assert len(load.copies) > 5  # of which one is in flight
    driver.run()
    driver.add(request("again", [*[9] * 40, *driver.tokens["first"]], 2))
    driver.run()
    assert driver.outputs["again"][0].num_cached_tokens >= 36
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


def test_a_request_whose_first_step_runs_out_of_memory_is_not_swapped() -> None:
    """It has computed nothing: a load without copies would never end."""
    driver = Driver(layout(["full"], num_pages=5), host_pages=60, preemption_mode="swap")
    driver.add(request("first", [7] * 10, 2))
    driver.schedule()
    driver.run_out_of_memory()
    assert driver.scheduler.work.preemptions == {"recompute": 1, "swap": 0}
    driver.run(max_steps=100)
    driver.check_idle()


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

"""A waiter is always admitted in the end, even if its producer fails or is preempted."""

from __future__ import annotations

import pytest

from tests.worker.scheduling.scheduler_driver import Driver, request
from tests.worker.scheduling.shared_prompts import MIXES, STEPS, cached, make_driver, num_waiters, planned


def with_waiters(*mix: str, steps_in_flight: int = 1) -> Driver:
    """`a` is in its prefill, 16 of 60 tokens in flight and more ahead; `b` and `c` wait for 32 and 60 of them."""
    driver = make_driver(*mix, steps_in_flight=steps_in_flight, max_chunk=16)
    driver.add(request("a", range(60), 3))
    driver.add(request("b", [*range(32), *[1] * 8], 3))
    driver.add(request("c", range(60), 3))
    assert planned(driver) == {"a": (0, 16)}
    assert num_waiters(driver) == 2
    return driver


@STEPS
@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_each_waiter_is_admitted_when_its_prefix_is_published(mix: tuple[str, ...], steps_in_flight: int) -> None:
    driver = with_waiters(*mix, steps_in_flight=steps_in_flight)
    expected = {16: 2, 32: 1, 48: 1, 60: 0}
    while num_waiters(driver):
        while driver.schedule() is not None:
            driver.check()
        driver.receive()
        blocks = driver.scheduler.by_request["a"].blocks
        assert blocks is not None
        assert num_waiters(driver) == expected[blocks.processed]
    assert cached(driver) == {"a": 0, "b": 32, "c": 56}


@pytest.mark.parametrize("all_of_them", [False, True])
def test_sequences_wait_again_for_a_preempted_producer_when_it_continues(all_of_them: bool) -> None:
    driver = with_waiters()
    driver.receive()
    admission = driver.scheduler.admission
    if all_of_them:
        admission.preempt_all()
    else:
        admission.preempt(admission.running.first)
    assert num_waiters(driver) == 0
    driver.check()
    start = 0 if all_of_them else 16
    assert planned(driver) == {"a": (start, 16)}
    assert num_waiters(driver) == 2
    assert cached(driver) == {"a": 0, "b": 32, "c": 56}


def test_a_blocked_waiter_is_tried_when_its_prefix_is_published() -> None:
    """Nothing has come free by what is published."""
    driver = with_waiters()
    admission = driver.scheduler.admission
    waiter = driver.scheduler.by_request["b"]
    assert waiter.wait is not None
    admission.blocked[admission.clients.of(waiter)] = (waiter.wait, driver.scheduler.cache.num_releases)
    driver.receive()
    driver.schedule()
    driver.receive()
    assert admission.waiting.queue.first.request.request_id == "b"
    assert "b" in planned(driver)
    driver.run()

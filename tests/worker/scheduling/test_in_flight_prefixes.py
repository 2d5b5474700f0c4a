"""A waiter is always admitted in the end, whatever happens to its producer: it finishes, fails or is preempted."""

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


@STEPS
def test_waiters_return_to_the_queue_at_once_when_their_producer_ends(steps_in_flight: int) -> None:
    driver = with_waiters(steps_in_flight=steps_in_flight)
    driver.finished.append("a")
    driver.scheduler.abort("a")
    assert num_waiters(driver) == 0
    driver.check()
    if steps_in_flight == 2:  # what is in flight will be published, but no sequence waits for it any more
        assert planned(driver) == {"b": (0, 16)}
        assert num_waiters(driver) == 1
    assert set(cached(driver)) == {"b", "c"}


@STEPS
def test_waiters_return_to_the_queue_at_once_when_a_step_fails(steps_in_flight: int) -> None:
    driver = with_waiters(steps_in_flight=steps_in_flight)
    driver.fail()
    driver.check()
    assert driver.finished == ["a"]
    assert planned(driver) == {"b": (0, 16)}
    assert cached(driver) == {"b": 0, "c": 32}


def test_a_waiter_that_ends_leaves_no_trace() -> None:
    driver = with_waiters()
    driver.abort("b")
    driver.check()
    assert num_waiters(driver) == 1
    driver.scheduler.reset()
    assert not driver.scheduler.has_work
    assert driver.scheduler.num_waiting == 0


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


def test_no_sequence_waits_for_a_preempting_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver(max_chunk=16)
    for name, prompt in (("old", [9] * 5), ("a", range(60)), ("b", range(60))):
        driver.add(request(name, prompt, 3))
    assert planned(driver) == {"old": (0, 5), "a": (0, 16)}
    assert num_waiters(driver) == 1
    admission = driver.scheduler.admission
    with monkeypatch.context() as patch:
        patch.setattr(driver.scheduler.cache, "extend", lambda *_, **__: False)
        assert admission.allocate_or_preempt(admission.running.first, 1, steps_in_flight=1) == 0
    assert num_waiters(driver) == 0
    driver.check()
    assert cached(driver) == {"old": 0, "a": 0, "b": 56}


def test_a_blocked_waiter_is_tried_when_its_prefix_is_published() -> None:
    """Nothing has come free by what is published."""
    driver = with_waiters()
    admission = driver.scheduler.admission
    admission.blocked, admission.blocked_at = driver.scheduler.by_request["b"].wait, driver.scheduler.cache.num_releases
    driver.receive()
    driver.schedule()
    driver.receive()
    assert admission.waiting.queue.first.request.request_id == "b"
    assert "b" in planned(driver)
    driver.run()

"""Prompts that arrive together and share a prefix are computed once: the later ones wait for the first (their producer). A waiter
is always admitted in the end, even if its producer fails or is preempted."""

import pytest

from tests.lost_windows import lose_left_behind, lose_windows
from tests.worker.scheduling.scheduler_driver import Driver, layout, request
from transom_core.contract import SamplingParams

STEPS = pytest.mark.parametrize("steps_in_flight", [1, 2])
MIXES = [("full",), ("window",), ("full", "window"), ("full", "sinks_window"), ("full", "window", "ragged_chunk")]
PROMPT = range(40)


def make_driver(*mix: str, num_pages: int = 200, **config: object) -> Driver:
    settings: dict[str, object] = dict(min_shared_tokens=1, max_num_batched_tokens=64) | config
    return Driver(layout(mix or ("full", "window"), num_pages=num_pages), **settings)  # type: ignore[arg-type]


def planned(driver: Driver) -> dict[str, tuple[int, int]]:
    """The next plan: (start, count) by request."""
    plan = driver.schedule()
    driver.check()
    if plan is None:
        return {}
    names = {sequence.seq_id: sequence.request.request_id for sequence in driver.scheduler.admission.running}
    rows = zip(plan.seq_ids, plan.start, plan.count, strict=True)
    return {names[seq_id]: (start, count) for seq_id, start, count in rows}


def cached(driver: Driver) -> dict[str, int]:
    driver.run()
    driver.check_idle()
    return {name: outputs[0].num_cached_tokens for name, outputs in driver.outputs.items() if outputs}


def num_waiters(driver: Driver) -> int:
    return len(driver.scheduler.admission.waiting.awaiting_prefix)


@STEPS
@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_equal_prompts_at_once_are_computed_once(mix: tuple[str, ...], steps_in_flight: int) -> None:
    driver = make_driver(*mix, steps_in_flight=steps_in_flight)
    for name in "abcd":
        driver.add(request(name, PROMPT, 3))
    assert planned(driver) == {"a": (0, 40)}
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting, driver.scheduler.waiting_tokens) == (1, 3, 12)
    assert cached(driver) == {"a": 0, "b": 36, "c": 36, "d": 36}
    assert driver.executor.num_computed == 40 + 3 * 4 + 4 * 2
    assert driver.scheduler.stats().outcome_tokens == {"missed_never_seen": 36, "hit": 108, "missed_last_token": 16}


@STEPS
@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_a_waiter_waits_for_the_shared_prefix_and_hits_all_of_it(mix: tuple[str, ...], steps_in_flight: int) -> None:
    """The windows where the two prompts part are kept for the waiter, though those of the producer have slid on."""
    driver = make_driver(*mix, steps_in_flight=steps_in_flight, window_repair=False)
    driver.add(request("a", range(60), 3))
    driver.add(request("b", [*range(22), *range(50, 70)], 3))
    assert planned(driver) == {"a": (0, 60)}
    assert num_waiters(driver) == 1
    driver.receive()
    assert num_waiters(driver) == 0
    lose_left_behind(driver.scheduler.cache)
    assert cached(driver) == {"a": 0, "b": 20}


def test_sequences_behind_a_waiter_run_and_do_not_take_its_running_slot() -> None:
    driver = make_driver(max_num_seqs=3)
    for name, prompt in (("a", PROMPT), ("b", PROMPT), ("c", [9] * 5), ("d", [8] * 5)):
        driver.add(request(name, prompt, 3))
    assert planned(driver) == {"a": (0, 40), "c": (0, 5)}
    assert [sequence.request.request_id for sequence in driver.scheduler.admission.waiting] == ["d", "b"]
    assert driver.scheduler.admission.waiting.num_before(driver.scheduler.by_request["d"]) == 1
    driver.run()
    assert driver.finished == ["a", "c", "b", "d"]


@STEPS
@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_a_long_prompt_behind_leaves_reserved_tokens_to_a_former_waiter(
    mix: tuple[str, ...], steps_in_flight: int
) -> None:
    driver = make_driver(*mix, steps_in_flight=steps_in_flight, num_pages=2000, max_model_len=1000)
    for name, prompt in (("a", PROMPT), ("b", PROMPT), ("c", [*PROMPT, 1, 2]), ("long", [9] * 600)):
        driver.add(request(name, prompt, 20))
    assert planned(driver) == {"a": (0, 40), "long": (0, 24)}
    for _ in range(steps_in_flight - 1):
        planned(driver)
    driver.receive()
    plan = planned(driver)
    assert (plan["b"], plan["c"]) == ((36, 4), (40, 2))
    assert plan["long"][1] > 40
    driver.run()


def test_other_salts_and_short_shared_prefixes_do_not_wait() -> None:
    driver = make_driver(min_shared_tokens=16, max_num_batched_tokens=200)
    driver.add(request("a", PROMPT, 3))
    driver.add(request("salted", PROMPT, 3, cache_salt="tenant"))
    driver.add(request("short", [*range(15), *[1] * 20], 3))
    driver.add(request("longer", [*range(16), *[1] * 20], 3))
    assert set(planned(driver)) == {"a", "salted", "short"}
    driver.run()


def test_a_sequence_with_a_longer_hit_does_not_wait() -> None:
    """Nor does the next sequence wait for the slower of two that compute the same hash blocks."""
    driver = make_driver(max_chunk=16)
    driver.add(request("before", range(60), 1))
    driver.run()
    driver.add(request("a", range(80), params=SamplingParams(max_tokens=3, prompt_logprobs=1)))
    assert planned(driver) == {"a": (0, 16)}
    driver.receive()
    for name in "bc":
        driver.add(request(name, range(80), 3))
    assert planned(driver) == {"a": (16, 16), "b": (60, 16)}
    assert cached(driver) == {"before": 0, "a": 0, "b": 60, "c": 76}


def test_a_window_repair_is_done_once() -> None:
    driver = make_driver("full", "window", max_chunk=8)
    driver.add(request("before", range(60), 1))
    driver.run()
    lose_windows(driver.scheduler.cache)
    for name in "abc":
        driver.add(request(name, range(60), 3))
    ((start, _),) = planned(driver).values()
    assert 0 < start < 56
    assert cached(driver) == {"before": 0, "a": start, "b": 56, "c": 56}
    assert driver.executor.num_repaired == 56 - start
    assert driver.scheduler.stats().outcome_requests == {"missed": 1, "repaired": 1, "hit": 2}


def test_many_equal_prompts_cost_two_searches_each(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver(num_pages=400, max_num_seqs=100, max_chunk=4)
    num_searches = 0
    find = driver.scheduler.cache.find

    def counted(*args: object) -> object:
        nonlocal num_searches
        num_searches += 1
        return find(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(driver.scheduler.cache, "find", counted)
    for number in range(100):
        driver.add(request(str(number), PROMPT, 2))
    for most in (32, 64, 96, 99, 99):
        driver.schedule()
        assert num_waiters(driver) == most
        driver.receive()
    driver.run()
    assert num_searches == 1 + 2 * 99
    assert driver.executor.num_computed == 40 + 99 * 4 + 100


def with_waiters(*mix: str) -> Driver:
    """`a` is in its prefill, 16 of 60 tokens in flight and more ahead; `b` and `c` wait for 32 and 60 of them."""
    driver = make_driver(*mix, steps_in_flight=1, max_chunk=16)
    driver.add(request("a", range(60), 3))
    driver.add(request("b", [*range(32), *[1] * 8], 3))
    driver.add(request("c", range(60), 3))
    assert planned(driver) == {"a": (0, 16)}
    assert num_waiters(driver) == 2
    return driver


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

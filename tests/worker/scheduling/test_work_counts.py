"""Why tokens were computed, for requests that are known step by step; random requests check the same in `Driver.check_idle`."""

from __future__ import annotations

from tests.lost_windows import lose_windows
from tests.worker.scheduling.scheduler_driver import BLOCK, Driver, layout, request


def counts(driver: Driver) -> dict[str, int]:
    work = driver.scheduler.work
    return {
        "prefill": work.prefill_tokens,
        "decode": work.decode_tokens,
        "repair": work.repair_tokens,
        "recompute": work.recompute_tokens,
    }


def test_a_prompt_is_prefill_and_sampled_tokens_are_decode() -> None:
    driver = Driver(layout(["full", "window"], num_pages=40))
    driver.add(request("a", range(20), 5))
    driver.run()
    assert counts(driver) == {"prefill": 20, "decode": 4, "repair": 0, "recompute": 0}  # the last is never computed
    assert (driver.scheduler.work.num_rows, driver.scheduler.work.prefill_rows) == (2 + 4, 2)
    driver.check_idle()


def test_what_is_known_of_a_resumed_answer_is_prefill() -> None:
    driver = Driver(layout(["full"], num_pages=40))
    driver.add(request("a", range(10), 8, resumed=(1, 2, 3, 4, 5)))
    driver.run()
    assert counts(driver) == {"prefill": 15, "decode": 2, "repair": 0, "recompute": 0}
    driver.check_idle()


def test_a_repair_counts_once_with_its_tokens() -> None:
    driver = Driver(layout(["full", "window"], num_pages=40), max_num_batched_tokens=64)
    driver.add(request("a", range(60), 2))
    driver.run()
    before = counts(driver)
    lose_windows(driver.scheduler.cache)
    driver.add(request("b", range(60), 2))
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_repairs == 1
    assert stats.outcome_requests == {"missed": 1, "repaired": 1}
    assert stats.repair_tokens == stats.outcome_tokens["repaired"] == driver.executor.num_repaired > 0
    assert counts(driver)["repair"] == stats.repair_tokens
    assert counts(driver)["prefill"] - before["prefill"] == 60 - stats.outcome_tokens["hit"] - stats.repair_tokens
    driver.check_idle()


def test_a_preemption_throws_away_what_is_computed_again() -> None:
    driver = Driver(layout(["full", "window"], num_pages=6), caching=False)
    for name in "abc":
        driver.add(request(name, [ord(name)] * 8, 20))
    driver.run()
    work = driver.scheduler.work
    assert work.num_preemptions == driver.scheduler.work.preemptions["recompute"] > 0
    assert work.recompute_tokens == work.preempted_tokens == driver.work.thrown_away > 0  # nothing is cached
    assert work.prefill_tokens == 3 * 8
    assert work.decode_tokens == 3 * 19
    driver.check_idle()


def test_what_the_cache_gives_back_is_not_computed_again() -> None:
    driver = Driver(layout(["full"], num_pages=6))
    for name in "abc":
        driver.add(request(name, [ord(name)] * 30, 24))
    driver.run()
    work = driver.scheduler.work
    assert 0 < work.recompute_tokens < work.preempted_tokens
    driver.check_idle()


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

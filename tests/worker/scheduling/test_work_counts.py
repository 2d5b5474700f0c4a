"""Why tokens were computed, for requests that are known step by step; random requests check the same in `Driver.check_idle`."""

from __future__ import annotations

from tests.worker.scheduling.scheduler_driver import BLOCK, Driver, layout, request


def test_a_prompt_is_prefill_and_sampled_tokens_are_decode() -> None:
    driver = Driver(layout(["full", "window"], num_pages=40))
    driver.add(request("a", range(20), 5))
    driver.run()
    work = driver.scheduler.work
    assert (work.prefill_tokens, work.decode_tokens) == (20, 4)  # the last is never computed
    assert (work.num_rows, work.prefill_rows) == (2 + 4, 2)
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

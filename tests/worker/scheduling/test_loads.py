"""Requests that load a hit from the host tier: others run on, and aborts, failures and restarts leave both tiers sound. Requests
whose prefix another one loads now wait for that load and hit its blocks on the device."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.worker.scheduling.scheduler_driver import ENTRY_MIXES, MIXES, Driver, layout, request
from tests.worker.scheduling.test_equal_prompts import STEPS, num_waiters
from transom_core.kv_cache.load_rates import LoadRates
from transom_worker.scheduling.sequence import SequenceStatus
from transom_worker.scheduling.step import StepPlan

PROMPT = [7] * 41
LATER = 1_000
CHEAP = 1  # nanoseconds to load a block


def spilled_driver(*mix: str, steps_in_flight: int = 1, **settings: object) -> Driver:
    """The host tier has PROMPT; a load takes long while others run. Waiting is worth its while for a single token."""
    options: dict[str, object] = dict(min_shared_tokens=1, max_num_batched_tokens=64) | settings
    driver = Driver(
        layout(mix or ("full", "window"), num_pages=60),
        host_pages=120,
        steps_in_flight=steps_in_flight,
        load_after=lambda: LATER,
        **options,  # type: ignore[arg-type]
    )
    driver.scheduler.cache.changes.set_rates(LoadRates(10**6, (CHEAP,) * len(driver.scheduler.cache.pools)))
    spill(driver, PROMPT)
    return driver


def spill(driver: Driver, prompt: list[int]) -> None:
    """Compute a prompt, and move all that is cached to the host tier."""
    driver.add(request(f"first {len(driver.requests)}", prompt, 2))
    driver.run()
    cache = driver.scheduler.cache
    while cache.eviction.evict_one():
        pass
    cache.evict_unpinned("test")
    assert not any(cache.index.groups)


def num_loaded(driver: Driver) -> int:
    return sum(group.loaded_blocks for group in driver.scheduler.stats().host_groups)


def begin(driver: Driver, *prompts: list[int]) -> None:
    """Requests "0", "1", ... arrive together; the first of them loads."""
    for i, prompt in enumerate(prompts):
        driver.add(request(str(i), prompt, 2))
    while driver.schedule() is not None:
        driver.check()
    assert driver.scheduler.by_request["0"].status is SequenceStatus.LOADING


def host_tokens(driver: Driver) -> dict[str, tuple[int, int]]:
    """By request: prompt tokens that its first admission found cached, and those of them that the host tier spared."""
    return {
        name: (outputs[0].num_cached_tokens, outputs[0].num_host_tokens)
        for name, outputs in driver.outputs.items()
        if outputs and not name.startswith("first")
    }


@STEPS
@pytest.mark.parametrize("mix", [*MIXES, *ENTRY_MIXES], ids="+".join)
def test_choices_of_one_prompt_load_it_once(mix: tuple[str, ...], steps_in_flight: int) -> None:
    loaded = []
    for num_choices in (1, 4):
        driver = spilled_driver(*mix, steps_in_flight=steps_in_flight)
        begin(driver, *[PROMPT] * num_choices)
        assert num_waiters(driver) == num_choices - 1
        driver.run()
        found = host_tokens(driver)
        assert found["0"][0] == found["0"][1] > 0
        assert all(found[name] == (found["0"][0], 0) for name in found if name != "0")
        loaded.append(num_loaded(driver))
        driver.check_idle()
    assert loaded[0] == loaded[1] > 0


@STEPS
@pytest.mark.parametrize("mix", [("full",), ("full", "window"), ("sinks_window", "window1")], ids="+".join)
@pytest.mark.parametrize("second", [PROMPT[:30], [*PROMPT[:30], *[1] * 9], [*PROMPT, *[3] * 20]])
def test_a_shorter_and_a_longer_prefix_share_what_both_load(
    second: list[int], mix: tuple[str, ...], steps_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt ends inside the first one's load, parts from it there, or goes on after it in the host tier."""
    driver = spilled_driver(*mix, steps_in_flight=steps_in_flight)
    spill(driver, [*PROMPT, *[3] * 30])
    before = num_loaded(driver)
    submit, copies = driver.executor.submit, []

    def noted(plan: StepPlan) -> None:
        columns = zip(plan.copy_group, plan.copy_source, plan.copy_ticket, strict=True)
        copies.extend((group, source) for group, source, ticket in columns if ticket)
        submit(plan)

    monkeypatch.setattr(driver.executor, "submit", noted)
    begin(driver, PROMPT, second)
    driver.run()
    assert num_loaded(driver) - before == len(copies) == len(set(copies))
    # the second request found what the first one loaded
    assert host_tokens(driver)["1"][0] > host_tokens(driver)["1"][1]
    driver.check_idle()


def test_a_load_with_a_small_part_of_what_is_lacking_is_not_waited_for() -> None:
    driver = spilled_driver("full", min_shared_tokens=24)
    spill(driver, [*PROMPT[:20], *[3] * 20])
    begin(driver, PROMPT, [*PROMPT[:20], *[3] * 20])
    assert num_waiters(driver) == 0
    driver.run()
    driver.check_idle()


def _abort(driver: Driver) -> None:
    driver.abort("0")


def _preempt(driver: Driver) -> None:
    admission = driver.scheduler.admission
    admission._preempt_after_step(driver.scheduler.by_request["0"])


@STEPS
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("end", [_abort, _preempt])
@pytest.mark.usefixtures("one_block_in_flight")
def test_a_load_is_shared_though_its_request_is_gone(
    end: Callable[[Driver], None], mode: str, steps_in_flight: int
) -> None:
    """The pieces of it that have not been sent, too."""
    driver = spilled_driver(steps_in_flight=steps_in_flight, preemption_mode=mode)
    begin(driver, PROMPT, PROMPT)
    (load,) = driver.scheduler.cache.tiers.loads.by_ticket.values()
    end(driver)
    driver.check()
    assert num_waiters(driver) == 1
    driver.add(request("2", PROMPT, 2))  # while the load's own request is not running any more
    driver.run()
    assert num_loaded(driver) == len(load.copies)
    assert host_tokens(driver)["1"] == host_tokens(driver)["2"] == (40, 0)
    driver.check_idle()


def test_a_restart_of_the_ranks_ends_waits_for_loads() -> None:
    driver = spilled_driver()
    begin(driver, PROMPT, PROMPT)
    driver.in_flight.clear()
    driver.scheduler.admission.abandon_loads()
    assert num_waiters(driver) == 0
    assert [one.request.request_id for one in driver.scheduler.admission.waiting] == ["1"]
    driver.scheduler.reset()
    assert not driver.scheduler.has_work
    stats = driver.scheduler.stats()
    assert (stats.free_pages, stats.host_free_pages) == (stats.num_pages, stats.host_pages)


def evicted_driver(**config: Any) -> Driver:
    """A pool of 20 blocks, from which request "a" was evicted by others to the host tier; loads take long while others run."""
    driver = Driver(
        layout(["full"], num_pages=5), host_pages=60, max_num_batched_tokens=64, load_after=lambda: LATER, **config
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
    driver = evicted_driver()
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
    driver = evicted_driver()
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
    # blocks that were never sent are not counted
    assert sum(cache.tiers.loads.num_loaded) == driver.executor.num_loaded
    driver.check_idle()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_plans_copied_stays_when_one_runs_out_of_memory(steps_in_flight: int) -> None:
    """Ranks make the copies of every plan: nothing is loaded twice, nothing cached is lost, and swapped requests come back."""
    driver = evicted_driver(steps_in_flight=steps_in_flight)
    driver.add(request("spills", range(60), 2))
    assert 0 in driver.next_plan().copy_ticket
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

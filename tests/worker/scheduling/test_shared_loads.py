"""Requests whose prefix another one loads from the host tier now: they wait for that load and hit its blocks on the device."""

from __future__ import annotations

from collections.abc import Callable

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
    assert (
        host_tokens(driver)["1"][0] > host_tokens(driver)["1"][1]
    )  # the second request found what the first one loaded
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

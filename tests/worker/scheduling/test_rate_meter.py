"""Measured rates of computing and loading reach the cache in steps, and decide between the two."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from tests.worker.scheduling.scheduler_driver import Driver, layout, request
from transom_core.kv_cache.load_rates import LoadRates
from transom_worker.scheduling.rate_meter import STALE_OCCASIONS, NoisyMean, RateMeter, ReadMeter
from transom_worker.scheduling.step import StepPlan, StepTimings


def prompt_step(num_tokens: int) -> StepPlan:
    return StepPlan(step_id=0, start=[0], count=[num_tokens])


def test_rates_change_only_when_they_are_off_by_a_quarter() -> None:
    meter = RateMeter([1000, 500])
    rates = LoadRates(1_000_000, (100, 50))
    assert meter.next_rates(rates) is None  # nothing was measured
    meter.stepped(prompt_step(100), StepTimings(forward_s=0.1))  # 1 ms a token
    assert meter.next_rates(rates) is None
    meter.stepped(prompt_step(20), StepTimings(forward_s=9.0))  # too few tokens
    meter.stepped(StepPlan(step_id=0, start=[5] * 99, count=[1] * 99), StepTimings(forward_s=9.0))  # decoding
    assert meter.next_rates(rates) is None
    for _ in range(20):
        meter.loaded([2, 4], 4e-3)  # 4,000 bytes: 1 us a byte
    loaded = meter.next_rates(rates)
    assert loaded is not None
    assert loaded.token_ns == 1_000_000
    assert loaded.block_ns == pytest.approx((1_000_000, 500_000), rel=0.03)
    for _ in range(50):
        meter.stepped(prompt_step(100), StepTimings(prepare_s=0.05, forward_s=0.15))
    changed = meter.next_rates(rates)
    assert changed is not None
    assert changed.token_ns == pytest.approx(2_000_000, rel=0.03)
    assert meter.next_rates(changed) is None


def test_reads_have_a_rate_of_their_own() -> None:
    meter, rates = ReadMeter([1000, 500]), LoadRates(7, (100, 50), (1_000, 500))
    meter.not_made()
    meter.made([0, 0], 9.0)  # no measure
    assert meter.next_rates(rates) is None
    for _ in range(20):
        meter.made([2, 4], 12e-6)  # 4,000 bytes: 3 ns a byte
    changed = meter.next_rates(rates)
    assert changed is not None
    assert changed.read_ns == pytest.approx((3_000, 1_500), rel=0.03)
    assert changed[:2] == rates[:2]


def test_loads_that_were_slow_are_tried_again() -> None:
    """While prompts are computed and none is loaded, the estimate decays; a measurement then counts for more. So with reads."""
    meter = RateMeter([1000])
    for _ in range(20):
        meter.loaded([1], 3e-3)
    rates = meter.next_rates(LoadRates(1, (1,)))
    assert rates is not None
    assert rates.block_ns[0] == pytest.approx(3_000_000, rel=0.03)
    num_steps = 0
    while rates.block_ns[0] > 1_000_000:
        meter.stepped(prompt_step(100), StepTimings(forward_s=0.1))
        rates = meter.next_rates(rates) or rates
        num_steps += 1
    assert 5 * STALE_OCCASIONS <= num_steps <= 6 * STALE_OCCASIONS
    meter.loaded([1], 3e-3)
    rates = meter.next_rates(rates) or rates
    assert 2_300_000 < rates.block_ns[0] < 3_100_000
    for _ in range(100 * STALE_OCCASIONS):
        meter.stepped(prompt_step(100), StepTimings(forward_s=0.1))
        rates = meter.next_rates(rates) or rates
    assert 100_000 < rates.block_ns[0] < 250_000  # it does not decay to nothing


def test_one_slow_load_among_many_does_not_end_loads() -> None:
    """Noise of a factor 2 around 0.6 ms; computing takes 1 ms. Rates change seldom all the while."""
    rng = random.Random(0)
    meter, rates, num_changes = RateMeter([1000]), LoadRates(1_000_000, (600_000,)), 0
    for _ in range(1_000):
        meter.stepped(prompt_step(100), StepTimings(forward_s=0.1))
        meter.loaded([1], 6e-4 * 2.0 ** rng.gauss(0, 1))
        if (changed := meter.next_rates(rates)) is not None:
            rates, num_changes = changed, num_changes + 1
        assert rates.block_ns[0] < rates.token_ns
    assert num_changes < 60


def test_a_slow_host_tier_is_not_read() -> None:
    """The same conversation, with loads that cost nothing and with loads that cost more than computing."""
    loaded = []
    for load_ns in (0, 10**12):
        driver = Driver(layout(["full"], num_pages=5), host_pages=60, max_num_batched_tokens=64)
        driver.scheduler.cache.changes.set_rates(LoadRates(1_000, (load_ns,)))
        for name in ("a", "b", "c", "a again"):
            driver.add(request(name, [ord(name[0])] * 40, 2))
            driver.run()
        stats = driver.scheduler.stats()
        loaded.append((driver.executor.num_loaded, stats.host_tokens, stats.host_groups[0].loaded_blocks))
        assert stats.host_groups[0].spilled_blocks > 0
        driver.check_idle()
    assert loaded == [(9, 36, 9), (0, 0, 0)]


# The averages under the rates


def noisy(median: float, factor: float, count: int, rng: random.Random) -> list[float]:
    return [median * factor ** rng.gauss(0, 1) for _ in range(count)]


def added(values: list[float]) -> NoisyMean:
    mean = NoisyMean()
    for value in values:
        mean.add(value)
    return mean


def test_a_change_is_told_from_an_outlier() -> None:
    rng = random.Random(2)
    for _ in range(20):
        mean = added(noisy(0.2, 1.5, 60, rng))
        before = mean.mean()
        mean.add(4.0)
        assert mean.mean() < 1.5 * before
        mean.add(4.0)
        assert mean.mean() > 2.0


def test_it_is_less_sure_of_few_and_of_noisy_times() -> None:
    rng = random.Random(3)

    def doubt(mean: NoisyMean) -> float:
        return mean.mean() / mean.mean(optimism=1.0)

    assert doubt(added([1.0])) > doubt(added([1.0] * 5)) > doubt(added([1.0] * 20))
    assert doubt(added(noisy(1.0, 2.0, 100, rng))) > doubt(added(noisy(1.0, 1.1, 100, rng)))


def test_a_noisy_mean_is_the_mean_and_not_the_median() -> None:
    """Half of noisy times are shorter than their median, but the longer ones cost more."""
    rng, means = random.Random(1), []
    for _ in range(100):
        mean = NoisyMean()
        for _ in range(100):
            mean.add(0.5 * 2.0 ** rng.gauss(0, 1))
        means.append(mean.mean())
    assert statistics.mean(means) == pytest.approx(0.5 * math.exp(math.log(2) ** 2 / 2), rel=0.1)
    assert statistics.stdev(means) < 0.25 * statistics.mean(means)  # of one measurement it is 0.78

"""What is learned from steps: the pace and the limits that follow from it, and how prompts share them; the rates of computing and
loading, which reach the cache in steps and decide between the two."""

import math
import random
import statistics

import pytest
from hypothesis import given, strategies as st

from tests.present import present
from tests.worker.scheduling.scheduler_driver import Driver, layout, request
from transom_core.kv_cache.load_rates import LoadRates
from transom_worker.scheduling.dividing import QUANTUM, share_limit
from transom_worker.scheduling.prompt_pace import FIRST_TOKENS, LEAST_TOKENS, PromptPace
from transom_worker.scheduling.rate_meter import STALE_OCCASIONS, NoisyMean, RateMeter, ReadMeter
from transom_worker.scheduling.step import StepPlan, StepTimings


def step(*rows: tuple[int, int]) -> StepPlan:
    return StepPlan(step_id=0, start=[start for start, _ in rows], count=[count for _, count in rows])


def takes(seconds: float) -> StepTimings:
    return StepTimings(prepare_s=0.1 * seconds, copy_s=0.1 * seconds, forward_s=0.7 * seconds, sample_s=0.1 * seconds)


DECODES, PROMPT = step((40, 1)), step((0, 100))


@pytest.mark.parametrize(
    ("target_s", "steps", "decodes", "context", "limit"),
    [
        pytest.param(
            0.1, [(step((40, 1), (7, 1)), 0.03), (PROMPT, 0.0)], True, 0, FIRST_TOKENS, id="nothing, or a stub's"
        ),
        pytest.param(0.2, [(DECODES, 0.06), (step((0, 200)), 0.1)], True, 0, 256, id="the docstring's example"),
        pytest.param(
            1.01, [(DECODES, 0.03), (step((41, 1), (0, 100)), 0.13)], False, 0, 960, id="without decoding rows"
        ),
        pytest.param(1.01, [(PROMPT, 0.1), (step((4096, 100)), 0.4)], False, 0, 960, id="contexts apart"),
        pytest.param(1.01, [(PROMPT, 0.1), (step((4096, 100)), 0.4)], False, 8192, 192, id="the nearest of two"),
        pytest.param(1.0, [(PROMPT, 0.1), (DECODES, 0.6)], True, 0, 576, id="half of the target"),
        pytest.param(1.0, [(PROMPT, 0.1), (DECODES, 2.0)], True, 0, 1984, id="as much time as decoding"),
        pytest.param(0.1, [(PROMPT, 1000.0)], True, 0, LEAST_TOKENS, id="a chunk that is worth a step"),
        pytest.param(
            0.1, [(PROMPT, 0.1), (step((4096, 100)), 0.4)], True, 4096, 32, id="that takes as long after a long context"
        ),
        pytest.param(
            0.1, [(DECODES, 0.1), (PROMPT, 0.1), (step((4096, 100)), 0.4)], True, 4096, 48, id="or twice the fixed part"
        ),
    ],
)
def test_limits_follow_from_measured_steps(target_s, steps, decodes, context, limit):
    pace = PromptPace(target_s)
    for plan, seconds in steps:
        pace.stepped(plan, takes(seconds))
    assert pace.limit(context, decodes=decodes) == limit


def test_steps_of_fixed_and_proportional_time_come_to_the_target():
    """Each step costs 20 ms and 0.4 ms a token; the limit's own steps are what is measured."""
    pace, elapsed_s = PromptPace(0.2), 0.0
    for _ in range(40):
        num_tokens = present(pace.limit(0, decodes=False))
        elapsed_s = 0.02 + 0.0004 * num_tokens
        pace.stepped(step((0, num_tokens)), takes(elapsed_s))
    assert 0.2 - 64 * 0.0006 < elapsed_s <= 0.2


def test_the_example_of_shares_in_the_docstring():
    assert share_limit(200, [1500, 60, 900, 30], num_running=1) == [100, 60, 10, 30]
    assert share_limit(200, [1500], num_running=1) == [200]
    assert share_limit(200, [], num_running=0) == []


def test_equal_prompts_are_computed_one_after_the_other():
    assert share_limit(100, [300, 300, 300], num_running=0) == [100, 0, 0]
    assert share_limit(100, [40, 300, 300], num_running=1) == [40, 60, 0]
    assert share_limit(700, [300, 300, 300], num_running=0) == [300, 300, 100]


def test_a_waiting_prompt_starts_so_that_one_behind_it_can():
    assert share_limit(100, [1500, 900, 50], num_running=1) == [50, QUANTUM, 50]
    assert share_limit(100, [1500, 900, 50], num_running=2) == [50, 0, 50]  # it runs already


@given(st.integers(1, 300), st.lists(st.integers(0, 500), min_size=1, max_size=12), st.data())
def test_any_shares(limit, needs, data):
    num_running = data.draw(st.integers(0, len(needs)))
    shares = share_limit(limit, needs, num_running=num_running)
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    assert shares[0] >= min(needs[0], (limit + 1) // 2)
    assert sum(shares) >= min(limit, sum(needs))  # nothing is left unused
    quanta = sum(share for share in shares[max(1, num_running) :] if share <= QUANTUM)
    assert sum(shares) - quanta <= limit


class FixedPace(PromptPace):
    """The same limit for every step."""

    def __init__(self, limit: int) -> None:
        super().__init__(1.0)
        self._limit = limit
        self.asked: list[tuple[int, bool]] = []

    def limit(self, context: int, *, decodes: bool) -> int:
        self.asked.append((context, decodes))
        return self._limit


def paced(limit: int) -> tuple[Driver, FixedPace]:
    pace = FixedPace(limit)
    driver = Driver(
        layout(["full"], num_pages=400), max_model_len=500, max_num_batched_tokens=256, max_num_seqs=8, pace=pace
    )
    return driver, pace


def counts(driver: Driver) -> list[int]:
    plan = driver.next_plan()
    driver.receive()
    return plan.count


def test_a_decoding_request_limits_a_prompt_and_one_alone_has_no_limit():
    driver, pace = paced(20)
    driver.add(request("first", range(90), 60))
    assert counts(driver) == [90]
    assert not pace.asked
    driver.add(request("long", range(100, 400), 4))
    assert counts(driver) == [1, 20]
    assert counts(driver) == [1, 20]
    assert pace.asked == [(0, True), (20, True)]
    driver.run()


def test_short_prompts_pass_a_long_one():
    driver, _ = paced(64)
    driver.add(request("long", range(400), 2))
    for number in range(3):
        driver.add(request(f"short {number}", [1000 + number, *range(19)], 2))
    assert counts(driver) == [32, 20, 12]  # the third one's first tokens fill the step
    assert sum(counts(driver)) <= 64 + 1
    driver.run()
    assert driver.finished[-1] == "long"
    order = [name for name in driver.finished if name != "long"]
    assert order == sorted(order)


def test_rates_change_only_when_they_are_off_by_a_quarter() -> None:
    meter = RateMeter([1000, 500])
    rates = LoadRates(1_000_000, (100, 50))
    assert meter.next_rates(rates) is None  # nothing was measured
    meter.stepped(PROMPT, StepTimings(forward_s=0.1))  # 1 ms a token
    assert meter.next_rates(rates) is None
    meter.stepped(step((0, 20)), StepTimings(forward_s=9.0))  # too few tokens
    meter.stepped(StepPlan(step_id=0, start=[5] * 99, count=[1] * 99), StepTimings(forward_s=9.0))  # decoding
    assert meter.next_rates(rates) is None
    for _ in range(20):
        meter.loaded([2, 4], 4e-3)  # 4,000 bytes: 1 us a byte
    loaded = present(meter.next_rates(rates))
    assert loaded.token_ns == 1_000_000
    assert loaded.block_ns == pytest.approx((1_000_000, 500_000), rel=0.03)
    for _ in range(50):
        meter.stepped(PROMPT, StepTimings(prepare_s=0.05, forward_s=0.15))
    changed = present(meter.next_rates(rates))
    assert changed.token_ns == pytest.approx(2_000_000, rel=0.03)
    assert meter.next_rates(changed) is None


def test_reads_have_a_rate_of_their_own() -> None:
    meter, rates = ReadMeter([1000, 500]), LoadRates(7, (100, 50), (1_000, 500))
    meter.not_made()
    meter.made([0, 0], 9.0)  # no measure
    assert meter.next_rates(rates) is None
    for _ in range(20):
        meter.made([2, 4], 12e-6)  # 4,000 bytes: 3 ns a byte
    changed = present(meter.next_rates(rates))
    assert changed.read_ns == pytest.approx((3_000, 1_500), rel=0.03)
    assert changed[:2] == rates[:2]


def test_loads_that_were_slow_are_tried_again() -> None:
    """While prompts are computed and none is loaded, the estimate decays; a measurement then counts for more. So with reads."""
    meter = RateMeter([1000])
    for _ in range(20):
        meter.loaded([1], 3e-3)
    rates = present(meter.next_rates(LoadRates(1, (1,))))
    assert rates.block_ns[0] == pytest.approx(3_000_000, rel=0.03)
    num_steps = 0
    while rates.block_ns[0] > 1_000_000:
        meter.stepped(PROMPT, StepTimings(forward_s=0.1))
        rates = meter.next_rates(rates) or rates
        num_steps += 1
    assert 5 * STALE_OCCASIONS <= num_steps <= 6 * STALE_OCCASIONS
    meter.loaded([1], 3e-3)
    rates = meter.next_rates(rates) or rates
    assert 2_300_000 < rates.block_ns[0] < 3_100_000
    for _ in range(100 * STALE_OCCASIONS):
        meter.stepped(PROMPT, StepTimings(forward_s=0.1))
        rates = meter.next_rates(rates) or rates
    assert 100_000 < rates.block_ns[0] < 250_000  # it does not decay to nothing


def test_one_slow_load_among_many_does_not_end_loads() -> None:
    """Noise of a factor 2 around 0.6 ms; computing takes 1 ms. Rates change seldom all the while."""
    rng = random.Random(0)
    meter, rates, num_changes = RateMeter([1000]), LoadRates(1_000_000, (600_000,)), 0
    for _ in range(1_000):
        meter.stepped(PROMPT, StepTimings(forward_s=0.1))
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


def test_a_noisy_mean_is_the_mean_and_not_the_median() -> None:
    """Half of noisy times are shorter than their median, but the longer ones cost more."""
    rng = random.Random(1)
    means = [added(noisy(0.5, 2.0, 100, rng)).mean() for _ in range(100)]
    assert statistics.mean(means) == pytest.approx(0.5 * math.exp(math.log(2) ** 2 / 2), rel=0.1)
    assert statistics.stdev(means) < 0.25 * statistics.mean(means)  # of one measurement it is 0.78

"""A moving average of noisy times: noise hardly moves it, a change does, and it says how sure it is."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from transom_worker.scheduling.noisy_mean import NoisyMean


def noisy(median: float, factor: float, count: int, rng: random.Random) -> list[float]:
    return [median * factor ** rng.gauss(0, 1) for _ in range(count)]


def added(values: list[float]) -> NoisyMean:
    mean = NoisyMean()
    for value in values:
        mean.add(value)
    return mean


def test_it_is_the_mean_and_not_the_median() -> None:
    rng = random.Random(1)
    means = [added(noisy(0.5, 2.0, 100, rng)).mean() for _ in range(100)]
    assert statistics.mean(means) == pytest.approx(0.5 * math.exp(math.log(2) ** 2 / 2), rel=0.1)
    assert statistics.stdev(means) < 0.25 * statistics.mean(means)  # of one measurement it is 0.78


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

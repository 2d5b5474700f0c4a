"""`NoisyMean`: a moving average of noisy times that follows changes and knows its own uncertainty: a Kalman filter on logarithms.

Times are compared by ratios, so the filter works on their logarithms: 4 and 1/4 are equally far from 1. Terms:

    noise        the variance of one measurement's logarithm, learned from the differences of successive measurements
    uncertainty  the variance of the average's logarithm; a new measurement has the weight uncertainty / (uncertainty + noise)

The average is of about the last `1 / sqrt(DRIFT)` = 18 measurements, so that noise hardly moves it. (Each measurement adds `DRIFT`
times the noise to the uncertainty; this settles where the weight is about `sqrt(DRIFT)`.) If two measurements in succession are
both off to the same side by more than `CHANGE` standard deviations, the times have changed: the average starts again.

Example: loads took 0.2 s each, with noise of a factor 1.5; now they take 4 s. The first one might be an outlier: the average is
0.27 s. After the second one it is 2 to 7 s, and soon 4 s.
"""

from __future__ import annotations

import math

DRIFT = 0.003  # uncertainty that each measurement adds, as a share of the noise
FIRST_NOISE = 0.35**2  # assumed before the second measurement: one standard deviation is a factor of e^0.35 = 1.4
LEAST_NOISE = 0.05**2  # keeps equal measurements from looking exact
NOISE_WEIGHT = 0.05  # weight of the newest difference in the learned noise
CHANGE = 2.5  # standard deviations


class NoisyMean:
    """The average of positive measurements; there is none before the first `add`."""

    def __init__(self) -> None:
        self.num_measured = 0
        self._log = 0.0
        self._uncertainty = 0.0
        self._noise = FIRST_NOISE
        self._last_log = 0.0
        self._last_error = 0.0  # how far the newest measurement was from the average before it; 0 after a change

    def add(self, value: float, *, drift: float = 0.0) -> None:
        """Take a measurement. Since the last one the true mean may have changed by a factor of about e^drift."""
        log = math.log(value)
        self.num_measured += 1
        if self.num_measured == 1:
            self._log, self._uncertainty = log, self._noise
        else:
            self._learn_noise(log - self._last_log)
            self._correct(log - self._log, self._uncertainty + drift**2)
        self._last_log = log

    def mean(self, *, optimism: float = 0.0) -> float:
        """Return the mean, lowered by `optimism` standard deviations of its own uncertainty.

        If a logarithm has mean m and variance `noise`, the mean of the times themselves is exp(m + noise / 2).
        """
        return math.exp(self._log + self._noise / 2 - optimism * math.sqrt(self._uncertainty))

    def _learn_noise(self, difference: float) -> None:
        """Learn from the difference of two successive logarithms. Its variance is that of two measurements, hence the half."""
        weight = max(NOISE_WEIGHT, 1 / self.num_measured)
        self._noise += weight * (difference**2 / 2 - self._noise)

    def _correct(self, error: float, uncertainty: float) -> None:
        """Move the average towards a measurement that is off by `error`."""
        noise = max(self._noise, LEAST_NOISE)
        # How far this and the last measurement are both off to the same side.
        both = min(abs(error), abs(self._last_error)) if error * self._last_error > 0 else 0.0
        self._last_error = error
        if both**2 > CHANGE**2 * (noise + uncertainty):  # a change: this measurement gets most of the weight
            uncertainty += both**2
            self._last_error = 0.0
        weight = uncertainty / (uncertainty + noise)
        self._log += weight * error
        self._uncertainty = (1 - weight) * uncertainty + DRIFT * noise

"""`NoisyMean`: a moving average of noisy times that follows changes, and says how sure it is: a Kalman filter on logarithms.

Times are compared by ratios: 4 and 1/4 are equally far from 1. Terms:

    noise        the variance of one measurement's logarithm, learned from what successive measurements differ by
    uncertainty  the variance of the average's logarithm; a measurement's weight is its share in uncertainty + noise

The average is of about the last `1 / sqrt(DRIFT)` = 18 measurements, so that noise hardly moves it. Two in succession that are off
to the same side, by more than `CHANGE` times what noise explains, are a change: the average starts again.

Example: loads took 0.2 s each, with noise of a factor 1.5; now they take 4 s. The first one might be an outlier: the average is
0.27 s. With the second one it is 2 to 7 s, and soon 4 s.
"""

from __future__ import annotations

import math

DRIFT = 0.003  # uncertainty that each measurement adds, as a share of the noise
FIRST_NOISE = 0.35**2  # before two were measured: a factor of 1.4
LEAST_NOISE = 0.05**2
NOISE_WEIGHT = 0.05  # of the newest difference in the noise
CHANGE = 2.5  # standard deviations that two measurements in succession are off by


class NoisyMean:
    """The average of positive measurements; there is none before the first `add`."""

    def __init__(self) -> None:
        self.num_measured = 0
        self._log = 0.0
        self._uncertainty = 0.0
        self._noise = FIRST_NOISE
        self._last_log = 0.0
        self._last_error = 0.0  # of the newest measurement, before it counted

    def add(self, value: float, *, drift: float = 0.0) -> None:
        """Take a measurement; since the last one the average may have changed by a factor of e^drift."""
        log = math.log(value)
        self.num_measured += 1
        if self.num_measured == 1:
            self._log, self._uncertainty = log, self._noise
        else:
            self._learn_noise(log - self._last_log)
            self._correct(log - self._log, self._uncertainty + drift**2)
        self._last_log = log

    def mean(self, *, optimism: float = 0.0) -> float:
        """Return the mean of what was measured, less that number of standard deviations of its own uncertainty."""
        return math.exp(self._log + self._noise / 2 - optimism * math.sqrt(self._uncertainty))

    def _learn_noise(self, difference: float) -> None:
        weight = max(NOISE_WEIGHT, 1 / self.num_measured)
        self._noise += weight * (difference**2 / 2 - self._noise)

    def _correct(self, error: float, uncertainty: float) -> None:
        """Move the average towards a measurement that is off by `error`."""
        noise = max(self._noise, LEAST_NOISE)
        both = min(abs(error), abs(self._last_error)) if error * self._last_error > 0 else 0.0
        self._last_error = error
        if both**2 > CHANGE**2 * (noise + uncertainty):
            uncertainty += both**2
            self._last_error = 0.0
        weight = uncertainty / (uncertainty + noise)
        self._log += weight * error
        self._uncertainty = (1 - weight) * uncertainty + DRIFT * noise

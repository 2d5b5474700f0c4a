"""Measures the rates (`transom_core.kv_cache.load_rates`) by which the cache decides whether to load a block or to compute it.
`RateMeter` learns from steps' results what computing a token and loading a block from the host tier cost, `ReadMeter` what reading
a block from the disk tier costs.

The rates are averages in which noisy measurements have little weight (`NoisyMean`). The cache gets new rates only when one of them
is off by more than a quarter: each change is sent to every router, since a router must predict the same hit as the worker finds.

Loads and reads are measured only when they are made, and they are made only if they look cheap. Two rules prevent that an estimate
which is too high ends them for ever:

- The estimate is *optimistic*: `OPTIMISM` standard deviations of its uncertainty less than the mean. So a few slow loads among many
  do not stop all loads.
- The estimate decays by `DECAY` after each `STALE_OCCASIONS` occasions without a load or read, until one is tried again. An
  occasion is a step with prompts for loads, and a request for reads. The measurement that ends the decay has more weight.

Example with the constants below: loads took exactly 3 times as long as computing. After 80 steps with prompts (5 decays, since
3 x 0.8^5 is below 1) a load is tried; it takes 2 times longer than computing would have, and the estimate is 3 again.
"""

import math
from collections.abc import Sequence

from transom_core.kv_cache.load_rates import LoadRates
from transom_worker.scheduling.step import StepPlan, StepTimings

LEAST_TOKENS = 32  # a step with fewer prompt tokens says too little about the cost of one
STEP = 1.25  # rates change when they are off by this factor
OPTIMISM = 1.0  # standard deviations by which the estimate of a load or read is below the mean
STALE_OCCASIONS = 16  # without a load or read, after which its estimate decays
DECAY = 0.8
MOST_DECAYS = 12  # the estimate decays at most to 7 % of what was measured


class RateMeter:
    """Learns from steps and loads; `block_bytes` are a block's bytes by group."""

    def __init__(self, block_bytes: Sequence[int]) -> None:
        self._token_s = NoisyMean()
        self._loads = BlockCost(block_bytes)

    def stepped(self, plan: StepPlan, timings: StepTimings) -> None:
        """Learn from a step if at least half of its tokens are prompt tokens; it is also an occasion to load."""
        num_prompt_tokens = sum(count for count in plan.count if count > 1)
        if timings.compute_s > 0 and num_prompt_tokens >= max(LEAST_TOKENS, plan.num_tokens // 2):
            self._token_s.add(timings.compute_s / plan.num_tokens)
            self._loads.not_made()

    def loaded(self, num_blocks: Sequence[int], elapsed_s: float) -> None:
        """Learn from a load of `num_blocks[group]` blocks from the host tier."""
        self._loads.made(num_blocks, elapsed_s)

    def next_rates(self, present: LoadRates) -> LoadRates | None:
        """Return the rates that should hold instead of the present ones; None if those are near enough."""
        token_ns = present.token_ns
        if self._token_s.num_measured:
            token_ns = _stepwise(token_ns, self._token_s.mean() * 1e9)
        rates = present._replace(token_ns=token_ns, block_ns=self._loads.block_ns(present.block_ns))
        return None if rates == present else rates


class BlockCost:
    """Estimates what loading or reading a block costs, in proportion to its bytes; `block_bytes` are a block's bytes by group."""

    def __init__(self, block_bytes: Sequence[int]) -> None:
        self._block_bytes = block_bytes
        self._byte_s = NoisyMean()
        self._num_occasions = 0  # since the last load or decay
        self._num_decays = 0  # since the last load

    def made(self, num_blocks: Sequence[int], elapsed_s: float) -> None:
        """Learn from one load or read of `num_blocks[group]` blocks."""
        num_bytes = sum(count * size for count, size in zip(num_blocks, self._block_bytes, strict=True))
        if elapsed_s > 0 and num_bytes:
            self._byte_s.add(elapsed_s / num_bytes, drift=self._num_decays * math.log(DECAY))
            self._num_occasions = self._num_decays = 0

    def not_made(self) -> None:
        """Note an occasion without a load or read."""
        self._num_occasions += 1
        if self._num_occasions == STALE_OCCASIONS:
            self._num_occasions = 0
            self._num_decays = min(self._num_decays + 1, MOST_DECAYS)

    def block_ns(self, present_ns: tuple[int, ...]) -> tuple[int, ...]:
        """Return the nanoseconds per block, by group, that should hold instead of the present ones."""
        if not self._byte_s.num_measured:
            return present_ns
        byte_ns = self._byte_s.mean(optimism=OPTIMISM) * DECAY**self._num_decays * 1e9
        return tuple(_stepwise(ns, byte_ns * size) for ns, size in zip(present_ns, self._block_bytes, strict=True))


class ReadMeter(BlockCost):
    """Learns from loads from the disk (`made`), and from requests for which nothing is read (`not_made`)."""

    def next_rates(self, present: LoadRates) -> LoadRates | None:
        """Return the rates that should hold instead of the present ones; None if those are near enough."""
        rates = present._replace(read_ns=self.block_ns(present.read_ns))
        return None if rates == present else rates


def _stepwise(present_ns: int, measured_ns: float) -> int:
    """Return the measured value, or the present one if the two differ by less than a factor of `STEP`; at least 1 ns."""
    is_near = present_ns / STEP <= measured_ns <= present_ns * STEP
    return present_ns if is_near else max(1, round(measured_ns))


DRIFT = 0.003  # uncertainty that each measurement adds, as a share of the noise
FIRST_NOISE = 0.35**2  # assumed before the second measurement: one standard deviation is a factor of e^0.35 = 1.4
LEAST_NOISE = 0.05**2  # keeps equal measurements from looking exact
NOISE_WEIGHT = 0.05  # weight of the newest difference in the learned noise
CHANGE = 2.5  # standard deviations


class NoisyMean:
    """The average of positive measurements, which follows changes and knows its own uncertainty: a Kalman filter on logarithms.
    There is none before the first `add`.

    Times are compared by ratios, so the filter works on their logarithms: 4 and 1/4 are equally far from 1. Terms:

        noise        the variance of one measurement's logarithm, learned from the differences of successive measurements
        uncertainty  the variance of the average's logarithm; a new measurement has the weight uncertainty / (uncertainty + noise)

    The average is of about the last `1 / sqrt(DRIFT)` = 18 measurements, so that noise hardly moves it. (Each measurement adds
    `DRIFT` times the noise to the uncertainty; this settles where the weight is about `sqrt(DRIFT)`.) If two measurements in
    succession are both off to the same side by more than `CHANGE` standard deviations, the times have changed: the average starts
    again. Example: loads took 0.2 s each, with noise of a factor 1.5; now they take 4 s. The first one might be an outlier: the
    average is 0.27 s. After the second one it is 2 to 7 s, and soon 4 s.
    """

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

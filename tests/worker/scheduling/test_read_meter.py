"""Measured rates of reading from the disk reach the cache in steps, and a disk that was slow once is tried again."""

from __future__ import annotations

import pytest

from transom_core.kv_cache.load_rates import LoadRates
from transom_worker.scheduling.read_meter import MOST_DECAYS, STALE_REQUESTS, ReadMeter


def test_rates_change_only_when_they_are_off_by_a_quarter() -> None:
    meter = ReadMeter([1000, 500])
    rates = LoadRates(7, (100, 50), (1_000, 500))
    assert meter.next_rates(rates) is None  # nothing was measured
    meter.read([2, 4], 4.4e-6)  # 4,000 bytes: 1.1 ns a byte
    meter.read([0, 0], 9.0)  # no measure
    assert meter.next_rates(rates) is None
    for _ in range(20):
        meter.read([2, 4], 12e-6)
    changed = meter.next_rates(rates)
    assert changed is not None
    assert changed.read_ns == pytest.approx((3_000, 1_500), rel=0.03)
    assert changed[:2] == rates[:2]
    assert meter.next_rates(changed) is None


def test_reads_that_were_slow_are_tried_again() -> None:
    meter, rates = ReadMeter([1000]), LoadRates(1, (1,), (1_000,))
    for _ in range(10):
        meter.not_read()  # before the first read nothing is known that could decay
    assert meter.next_rates(rates) is None
    meter.read([1], 3e-3)
    rates = meter.next_rates(rates) or rates
    assert rates.read_ns == (3_000_000,)
    num_requests = 0
    while rates.read_ns[0] > 1_000_000:
        meter.not_read()
        rates = meter.next_rates(rates) or rates
        num_requests += 1
    assert num_requests <= 6 * STALE_REQUESTS
    meter.read([1], 3e-3)  # which weighs more than one behind others
    rates = meter.next_rates(rates) or rates
    assert rates.read_ns[0] > 2_500_000
    for _ in range(2 * MOST_DECAYS * STALE_REQUESTS):
        meter.not_read()
        rates = meter.next_rates(rates) or rates
    assert rates.read_ns[0] > 100_000  # it does not decay to nothing

from __future__ import annotations

from transom_worker.kvcache.histogram import BOUNDS_S, Histogram


def test_a_bound_belongs_to_the_bucket_below_it_and_counts_weigh() -> None:
    histogram = Histogram()
    histogram.observe(0.0)
    histogram.observe(BOUNDS_S[0], 3)
    histogram.observe(BOUNDS_S[-1] + 1)
    stats = histogram.stats()
    assert stats.counts == (4, *[0] * (len(BOUNDS_S) - 1), 1)
    assert stats.sum_s == 3 * BOUNDS_S[0] + BOUNDS_S[-1] + 1


def test_what_was_reported_does_not_change() -> None:
    histogram = Histogram()
    before = histogram.stats()
    histogram.observe(1.0)
    assert before.counts != histogram.stats().counts
    assert before.sum_s == 0.0

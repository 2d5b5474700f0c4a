"""Makes the metric families of one process: every sample has the process's own labels, such as `model` and `worker`."""

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from transom_core.telemetry.histogram import Buckets

Samples = Iterable[tuple[tuple[str, ...], float]]  # label values, value


def crossed(rows: Mapping[str, Mapping[str, float]]) -> Samples:
    """Return the samples of a table (row label -> column label -> value): one for each pair of a row's and a column's label."""
    return [((row, column), value) for row, columns in rows.items() for column, value in columns.items()]


class OwnLabels:
    """Makes metric families at a scrape. A method's `labels` are the family's labels besides the process's own."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.names = tuple(labels)
        self.values = tuple(labels.values())

    def gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        """Return a gauge with one sample."""
        return self.gauges(name, text, (), [((), value)])

    def gauges(self, name: str, text: str, labels: tuple[str, ...], samples: Samples) -> GaugeMetricFamily:
        """Return a gauge with samples by label."""
        family = GaugeMetricFamily(name, text, labels=(*self.names, *labels))
        for values, value in samples:
            family.add_metric((*self.values, *values), value)
        return family

    def counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        """Return a counter with one sample; `name` is without its `_total`."""
        return self.counters(name, text, (), [((), value)])

    def counters(self, name: str, text: str, labels: tuple[str, ...], samples: Samples) -> CounterMetricFamily:
        """Return a counter with samples by label; `name` is without its `_total`."""
        family = CounterMetricFamily(name, text, labels=(*self.names, *labels))
        for values, value in samples:
            family.add_metric((*self.values, *values), value)
        return family

    def histograms(
        self, name: str, text: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], Buckets]]
    ) -> HistogramMetricFamily:
        """Return a histogram with samples by label."""
        family = HistogramMetricFamily(name, text, labels=(*self.names, *labels))
        for values, buckets in samples:
            bounds = (*map(str, map(float, buckets.bounds)), "+Inf")
            cumulative = list(zip(bounds, accumulate(buckets.counts), strict=True))
            family.add_metric((*self.values, *values), cumulative, sum_value=buckets.sum)
        return family

"""Creates the metrics of one process in one registry, with the process's own labels, such as `model` and `worker`, on every series.

- **family**: a metric with all its label values, in Prometheus' sense; a **series** is one combination of label values.
"""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

M = TypeVar("M", bound=MetricWrapperBase)

disable_created_metrics()  # type: ignore[no-untyped-call]  # with the `_created` series pages would be 50 % longer


class Family(Generic[M]):
    """A metric whose first labels are the process's own; its methods take the values of the other labels."""

    def __init__(self, metric: M, own_values: Sequence[str]) -> None:
        self._metric = metric
        self._own_values = own_values
        # Values of the other labels -> series. It saves calls of `labels`, which makes strings of all values under a lock.
        self._series: dict[tuple[str, ...], M] = {}

    def of(self, *values: str) -> M:
        """Return one series. It is on the metrics page from now on."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._metric.labels(*self._own_values, *values)
        return series

    def forget(self, *values: str) -> None:
        """Remove a series from the metrics page; an unknown series is ignored."""
        self._series.pop(values, None)
        self._metric.remove(*self._own_values, *values)


class MetricFamilies:
    """Creates the metrics of one process. If there is one label besides its own, `values` may be given: the series of these values
    are on the page, at 0, from the start, because a rate needs the value before the first event."""

    def __init__(self, **own_labels: str) -> None:
        self.registry = CollectorRegistry()
        self.own_labels = own_labels

    def counter(self, name: str, text: str, *labels: str, values: Iterable[str] = ()) -> Family[Counter]:
        """Create a counter with further labels; `name` is without `_total`."""
        return self._own(Counter(name, text, (*self.own_labels, *labels), registry=self.registry), values)

    def gauge(self, name: str, text: str, *labels: str) -> Family[Gauge]:
        """Create a gauge with further labels."""
        return self._own(Gauge(name, text, (*self.own_labels, *labels), registry=self.registry))

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], *labels: str, values: Iterable[str] = ()
    ) -> Family[Histogram]:
        """Create a histogram with further labels."""
        histogram = Histogram(name, text, (*self.own_labels, *labels), buckets=buckets, registry=self.registry)
        return self._own(histogram, values)

    def _own(self, metric: M, values: Iterable[str] = ()) -> Family[M]:
        family = Family(metric, tuple(self.own_labels.values()))
        for value in values:
            family.of(value)
        return family

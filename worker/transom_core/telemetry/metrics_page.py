"""Renders the metrics of one process as a page."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from transom_core.config import MetricsCompat
from transom_core.telemetry.genai_names import genai_families, wants_latest_names
from transom_core.telemetry.vllm_names import vllm_families

MoreFamilies = Callable[[Mapping[str, Metric]], Iterator[Metric]]


class WithMoreNames(Collector):
    """The families of another collector, and after them those that `more` make of them, by name."""

    def __init__(self, collector: Collector, *more: MoreFamilies) -> None:
        self._collector, self._more = collector, more

    def collect(self) -> Iterator[Metric]:
        """Make the families; the client library calls this at each scrape."""
        families = {family.name: family for family in self._collector.collect()}
        yield from families.values()
        for make in self._more:
            yield from make(families)


def metrics_page(collector: Collector, *, openmetrics: bool = False, compat: MetricsCompat = "none") -> bytes:
    """Return the page in Prometheus' text format, or in the OpenMetrics format, which has exemplars. `compat` adds the names of
    another server, the environment may add OpenTelemetry's."""
    more = [] if compat == "none" else [vllm_families]
    more += [genai_families] if wants_latest_names() else []
    shown = WithMoreNames(collector, *more)
    if not openmetrics:
        return generate_latest(shown)
    # With the library's default instead of `ALLOWUTF8`, this page would have vllm_x for vllm:x.
    page: bytes = generate_openmetrics(shown, ALLOWUTF8)  # type: ignore[no-untyped-call]
    return page

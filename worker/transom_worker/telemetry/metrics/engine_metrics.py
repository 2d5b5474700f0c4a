"""`EngineMetrics`: turns the engine's events into Prometheus metrics, and renders the metrics page."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from transom_core.config import MetricsCompat
from transom_core.telemetry.metric_families import MetricFamilies
from transom_core.telemetry.metrics_page import metrics_page
from transom_core.telemetry.own_labels import OwnLabels
from transom_core.telemetry.process import Process
from transom_worker.telemetry.engine_events import EngineEventSink, WorkerState
from transom_worker.telemetry.metrics.cache import cache_families
from transom_worker.telemetry.metrics.identity import Identity
from transom_worker.telemetry.metrics.ranks import rank_families
from transom_worker.telemetry.metrics.requests import Requests, Transfers
from transom_worker.telemetry.metrics.steps import Steps
from transom_worker.telemetry.metrics.work import adapter_families, grammar_families, policy_families, work_families


class EngineMetrics:
    """One worker's metrics, in a registry of its own. `sinks` count the engine's events; `text` renders the Prometheus page."""

    def __init__(self, *, model: str = "", worker: str = "0", compat: MetricsCompat = "none") -> None:
        self._compat = compat
        families = MetricFamilies(model=model, worker=worker)
        own, self.registry = OwnLabels(families.own_labels), families.registry
        self.transfers = Transfers(families)
        self._identity = Identity(own)
        steps, state = Steps(own), _StateCollector(own)
        self.sinks: tuple[EngineEventSink, ...] = (Requests(families), steps, state, self._identity)
        for collector in (steps, state, self._identity, Process(own)):
            self.registry.register(collector)

    def ready(self, start_s: float) -> None:
        """Set the seconds that the worker took to start."""
        self._identity.start_s = start_s

    def text(self, *, openmetrics: bool = False) -> bytes:
        """Return the page in Prometheus' text format, or in the OpenMetrics format, which has exemplars."""
        return metrics_page(self.registry, openmetrics=openmetrics, compat=self._compat)


class _StateCollector(EngineEventSink, Collector):
    """Metric families of the last published state; none before the first state is published."""

    def __init__(self, own: OwnLabels) -> None:
        self._own = own
        self.state: WorkerState | None = None
        self.num_rank_restarts = 0

    def ranks_lost(self) -> None:
        """The engine has lost a rank and starts all ranks again."""
        self.num_rank_restarts += 1

    def published(self, state: WorkerState) -> None:
        """Replace what a scrape reads of queue, cache and ranks."""
        self.state = state

    def collect(self) -> Iterator[Metric]:
        """Make the families; the client library calls this at each scrape."""
        state = self.state
        if state is None:
            return
        yield from work_families(self._own, state)
        yield from cache_families(self._own, state.stats)
        yield from policy_families(self._own, state.policies)
        yield from grammar_families(self._own, state.grammars)
        yield from adapter_families(self._own, state.adapters)
        yield from rank_families(self._own, state.ranks)
        yield self._own.counter(
            "transom_rank_restarts",
            "Times that a rank was lost and all ranks were started again.",
            self.num_rank_restarts,
        )

"""`EngineMetrics`: what the engine feeds, and the page that comes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from transom_worker.telemetry.metrics.cache import cache_families
from transom_worker.telemetry.metrics.identity import Identity
from transom_worker.telemetry.metrics.own_labels import OwnLabels
from transom_worker.telemetry.metrics.process import Process
from transom_worker.telemetry.metrics.ranks import rank_families
from transom_worker.telemetry.metrics.request_times import RequestTimes
from transom_worker.telemetry.metrics.requests import Requests
from transom_worker.telemetry.metrics.steps import Steps
from transom_worker.telemetry.metrics.work import work_families

if TYPE_CHECKING:
    from transom_worker.config import EngineConfig
    from transom_worker.execution.executor import ExecutorInfo
    from transom_worker.scheduling.step import StepTimings
    from transom_worker.telemetry.metrics.state import WorkerState

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each histogram and counter, which nobody reads


class EngineMetrics:
    """One worker's metrics, in a registry of its own; `text()` is its Prometheus page."""

    def __init__(self, *, model: str = "", worker: str = "0") -> None:
        own = OwnLabels({"model": model, "worker": worker})
        self.registry = CollectorRegistry()
        self._requests = Requests(own, self.registry)
        self._steps = Steps(own)
        self._state = _StateCollector(own)
        self._identity = Identity(own)
        for collector in (self._steps, self._state, self._identity, Process(own)):
            self.registry.register(collector)

    def started(self, config: EngineConfig, info: ExecutorInfo) -> None:
        """The executor has started with these settings."""
        self._identity.configure(config, info)

    def ready(self, start_s: float) -> None:
        """The worker took so long to start."""
        self._identity.start_s = start_s

    def refused(self, reason: str) -> None:
        """A request was not taken; `reason`: one of `REFUSALS`."""
        self._requests.refused(reason)

    def admitted(self, times: RequestTimes, *, num_prompt_tokens: int) -> None:
        """A request left the queue for the first time. Its prompt tokens are in the published state, with their outcomes."""
        self._requests.admitted(times, num_prompt_tokens=num_prompt_tokens)

    def scheduled(self, *, num_tokens: int, num_seqs: int) -> None:
        """A plan went to the ranks."""
        self._steps.scheduled(num_tokens=num_tokens, num_seqs=num_seqs)

    def stepped(self, timings: StepTimings, *, schedule_s: float, wait_s: float, output_s: float) -> None:
        """A result came back."""
        self._steps.stepped(timings, schedule_s=schedule_s, wait_s=wait_s, output_s=output_s)

    def token(self, times: RequestTimes, now_s: float) -> None:
        """A request got a token."""
        steps, last_s = self._steps, times.last_token_s
        steps.output_tokens += 1
        times.last_token_s = now_s
        if last_s:
            steps.inter_token.observe(now_s - last_s if now_s > last_s else 0.0)
        else:
            self._requests.first_token(times, now_s)

    def finished(self, times: RequestTimes, finish_reason: str, *, num_output_tokens: int) -> None:
        """A request ended: stop, length, abort or error."""
        self._requests.finished(times, finish_reason, num_output_tokens=num_output_tokens)

    def rank_lost(self) -> None:
        """A rank was lost, and all of them are started again."""
        self._state.num_rank_restarts += 1

    def publish(self, state: WorkerState) -> None:
        """Replace what a scrape reads of queue, cache and ranks. The engine's thread calls this a few times a second."""
        self._state.state = state

    def text(self, *, openmetrics: bool = False) -> bytes:
        """The page in Prometheus' text format, or as OpenMetrics, which has exemplars."""
        page: bytes = (generate_openmetrics if openmetrics else generate_latest)(self.registry)
        return page


class _StateCollector(Collector):
    """Families of the last published state; none before the first."""

    def __init__(self, own: OwnLabels) -> None:
        self._own = own
        self.state: WorkerState | None = None
        self.num_rank_restarts = 0

    def collect(self) -> Iterator[Metric]:
        """At scrape time."""
        state = self.state
        if state is None:
            return
        yield from work_families(self._own, state)
        yield from cache_families(self._own, state.stats)
        yield from rank_families(self._own, state.ranks)
        yield self._own.counter(
            "transom_rank_restarts",
            "Times that a rank was lost and all ranks were started again.",
            self.num_rank_restarts,
        )

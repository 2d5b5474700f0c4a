"""`EngineMetrics`: the engine's events as Prometheus metrics, and the metrics page that they become."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from transom_core.errors import Overloaded, RequestError, WorkerLost
from transom_core.telemetry.own_labels import OwnLabels
from transom_core.telemetry.process import Process
from transom_worker.telemetry.engine_events import EngineEventSink, EngineStepTimes, RequestTimes
from transom_worker.telemetry.metrics.answers import grammar_families, policy_families
from transom_worker.telemetry.metrics.cache import cache_families
from transom_worker.telemetry.metrics.identity import Identity
from transom_worker.telemetry.metrics.ranks import rank_families
from transom_worker.telemetry.metrics.requests import Requests
from transom_worker.telemetry.metrics.steps import Steps
from transom_worker.telemetry.metrics.transfers import Transfers
from transom_worker.telemetry.metrics.work import work_families

if TYPE_CHECKING:
    from transom_core.config import EngineConfig
    from transom_worker.execution.executor import ExecutorInfo
    from transom_worker.scheduling.step import StepPlan, StepTimings
    from transom_worker.telemetry.worker_state import WorkerState

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would add a series to each histogram and counter


REFUSAL_REASONS = ((Overloaded, "overloaded"), (WorkerLost, "worker_unavailable"), (RequestError, "request_refused"))
"""Label values of `transom_requests_refused_total` by class of error; any other error is an `internal_error`."""


class EngineMetrics(EngineEventSink):
    """One worker's metrics, in a registry of its own. Counts the engine's events; `text` renders the Prometheus page."""

    def __init__(self, *, model: str = "", worker: str = "0") -> None:
        own = OwnLabels({"model": model, "worker": worker})
        self.registry = CollectorRegistry()
        self._requests = Requests(own, self.registry)
        self.transfers = Transfers(own, self.registry)
        self._steps = Steps(own)
        self._state = _StateCollector(own)
        self._identity = Identity(own)
        for collector in (self._steps, self._state, self._identity, Process(own)):
            self.registry.register(collector)

    def ready(self, start_s: float) -> None:
        """Set the seconds that the worker took to start."""
        self._identity.start_s = start_s

    def text(self, *, openmetrics: bool = False) -> bytes:
        """The page in Prometheus' text format, or in the OpenMetrics format, which has exemplars."""
        page: bytes = (generate_openmetrics if openmetrics else generate_latest)(self.registry)
        return page

    # Events (see `EngineEventSink`)

    def started(self, config: EngineConfig, info: ExecutorInfo) -> None:
        """The executor has started with these settings."""
        self._identity.configure(config, info)

    def refused(self, error: Exception) -> None:
        """The engine has refused a request with `error`."""
        reasons = (reason for kind, reason in REFUSAL_REASONS if isinstance(error, kind))
        self._requests.refused(next(reasons, "internal_error"))

    def first_scheduled(self, times: RequestTimes, *, num_prompt_tokens: int) -> None:
        """A request left the queue for the first time. The published state counts its prompt tokens, with their outcomes."""
        self._requests.first_scheduled(times, num_prompt_tokens=num_prompt_tokens)

    def scheduled(self, plan: StepPlan) -> None:
        """The engine has sent a step's plan to the ranks."""
        self._steps.scheduled(num_tokens=plan.num_tokens, num_seqs=len(plan.seq_ids))

    def first_token(self, times: RequestTimes, now_s: float) -> None:
        """A request has its first token from this worker."""
        self._steps.output_tokens += 1
        times.last_token_s = now_s
        self._requests.first_token(times, now_s)

    def token(self, times: RequestTimes, now_s: float) -> None:
        """A request has another token."""
        steps, last_s = self._steps, times.last_token_s
        steps.output_tokens += 1
        times.last_token_s = now_s
        steps.inter_token.observe(now_s - last_s if now_s > last_s else 0.0)

    def stepped(self, rank_times: StepTimings, engine_times: EngineStepTimes) -> None:
        """A step's result has arrived, and its output events are made."""
        self._steps.stepped(rank_times, engine_times)

    def finished(self, times: RequestTimes, finish_reason: str, *, num_output_tokens: int) -> None:
        """A request has ended: stop, length, abort or error."""
        self._requests.finished(times, finish_reason, num_output_tokens=num_output_tokens)

    def ranks_lost(self) -> None:
        """The engine has lost a rank and starts all ranks again."""
        self._state.num_rank_restarts += 1

    def ran_out_of_memory(self) -> None:
        """A step ran out of memory."""
        self._steps.num_out_of_memory += 1

    def published(self, state: WorkerState) -> None:
        """Replace what a scrape reads of queue, cache and ranks."""
        self._state.state = state


class _StateCollector(Collector):
    """Metric families of the last published state; none before the first one."""

    def __init__(self, own: OwnLabels) -> None:
        self._own = own
        self.state: WorkerState | None = None
        self.num_rank_restarts = 0

    def collect(self) -> Iterator[Metric]:
        """Make the families; the client library calls this at each scrape."""
        state = self.state
        if state is None:
            return
        yield from work_families(self._own, state)
        yield from cache_families(self._own, state.stats)
        yield from policy_families(self._own, state.policies)
        yield from grammar_families(self._own, state.grammars)
        yield from rank_families(self._own, state.ranks)
        yield self._own.counter(
            "transom_rank_restarts",
            "Times that a rank was lost and all ranks were started again.",
            self.num_rank_restarts,
        )

"""The event stream of one engine: scheduler and engine report each event once, and several sinks consume it.

    Scheduler   queued, admitted, preempted ──┐                 ┌─> EngineMetrics     Prometheus metrics
                                              ├─> EngineEvents ─┼─> EngineTimelines   /debug/requests/{id}, spans, request log lines
    Engine      everything else ──────────────┘                 └─> BlockMapLog       the live block map

The events of one request come in this order:

    queued ─> admitted ─> first_scheduled ─> first_token ─> tokens ... ─> finished
                 ^                                            │
                 └─────────────── preempted <─────────────────┘

All methods are called on the engine's thread, several times per step and in the middle of the scheduler's decisions. So a sink must
not wait, raise, or change its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from transom_core.config import EngineConfig
from transom_core.contract import WorkerLoad
from transom_worker.execution.executor import ExecutorInfo, RankReport
from transom_worker.kvcache.stats import CacheStats
from transom_worker.scheduling.listener import SchedulerListener
from transom_worker.scheduling.step import StepPlan, StepTimings
from transom_worker.scheduling.work_counts import PolicyStats, WorkCounts
from transom_worker.telemetry.transfer_report import FetchReport

# OpenMetrics allows 128 characters in an exemplar's label names and values together; names and a trace id take 50 of them.
MAX_ID_CHARS = 78
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=@-]")
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class RequestTimes:
    """Identifies a request in the engine's events, and has the times of its events: seconds since the epoch, 0 before the event."""

    __slots__ = ("arrival_s", "exemplar", "first_token_s", "last_token_s", "request_id", "scheduled_s")

    def __init__(self, arrival_s: float, *, request_id: str = "", trace_parent: str | None = None) -> None:
        """`trace_parent` is a W3C traceparent header.

        `exemplar` is a label set that OpenMetrics attaches to a histogram's bucket. It leads from a slow bucket to the id and the
        trace of a request in that bucket.
        """
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.scheduled_s = 0.0  # when the first plan that computes the request was sent
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.exemplar = _exemplar(request_id, trace_parent)


class EngineStepTimes(NamedTuple):
    """Seconds that the engine's thread spent in one step: planning, waiting for the ranks' result, and making output events."""

    schedule_s: float
    wait_s: float
    output_s: float


class EngineEventSink(SchedulerListener):
    """Consumes an engine's events. Every method does nothing here; a sink overrides those that it needs."""

    def started(self, config: EngineConfig, info: ExecutorInfo) -> None:
        """The executor has started."""

    def refused(self, error: Exception) -> None:
        """The engine has refused a request with `error`."""

    def prefix_fetched(self, times: RequestTimes, report: FetchReport) -> None:
        """The fetch of a prefix from another worker has ended, with or without success; its request may be admitted now."""

    def scheduled(self, plan: StepPlan) -> None:
        """The engine has sent a step's plan to the ranks."""

    def first_scheduled(self, times: RequestTimes, *, num_prompt_tokens: int) -> None:
        """A plan that was sent computes tokens of a request for the first time."""

    def first_token(self, times: RequestTimes, now_s: float) -> None:
        """A request has its first token from this worker."""

    def tokens(self, times: list[RequestTimes], now_s: float) -> None:
        """Each of these requests has another token."""

    def stepped(self, rank_times: StepTimings, engine_times: EngineStepTimes) -> None:
        """A step's result has arrived, and its output events are made."""

    def finished(self, times: RequestTimes, finish_reason: str, *, num_output_tokens: int) -> None:
        """A request has ended: stop, length, abort, error or handover."""

    def ranks_lost(self) -> None:
        """The engine has lost a rank and starts all ranks again."""

    def ran_out_of_memory(self) -> None:
        """A step ran out of memory."""

    def published(self, state: WorkerState) -> None:
        """The engine has published the state of queue, cache and ranks: a few times a second, and whenever the engine becomes
        idle."""

    def close(self) -> None:
        """The engine shuts down; no events follow. Idempotent."""


class EngineEvents(EngineEventSink):
    """Passes each event on to the sinks that override its method, in their order."""

    def __init__(self, *sinks: EngineEventSink) -> None:
        for name in dir(EngineEventSink):
            if not name.startswith("_"):
                ignored = getattr(EngineEventSink, name)
                consumers = [getattr(sink, name) for sink in sinks if getattr(type(sink), name) is not ignored]
                setattr(self, name, _fan_out(consumers))


def _fan_out(consumers: list[Callable[..., None]]) -> Callable[..., None]:
    """Return a function that calls every consumer; a single consumer is returned itself."""
    if len(consumers) == 1:
        return consumers[0]

    def fan_out(*args: object, **named: object) -> None:
        for consume in consumers:
            consume(*args, **named)

    return fan_out


def _exemplar(request_id: str, trace_parent: str | None) -> dict[str, str]:
    labels = {"request_id": _UNSAFE.sub("_", request_id[:MAX_ID_CHARS])} if request_id else {}
    if trace_parent and (match := _TRACE_PARENT.match(trace_parent)):
        labels["trace_id"] = match[1]
    return labels


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStats:
    """Counts of answers with grammars, and what compiling grammars and computing masks has cost since start."""

    num_requests: int = 0
    num_failed: int = 0  # ended by an error of their grammar
    num_running: int = 0
    num_compiled: int = 0
    num_cached: int = 0  # grammars of requests that had been compiled for earlier requests
    compile_s: float = 0.0
    cache_bytes: int = 0
    num_masks: int = 0
    mask_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """The slots for LoRA adapters by state (used by requests, idle with an adapter, or free), and what loading adapters has cost
    since start."""

    num_used: int = 0
    num_idle: int = 0
    num_free: int = 0
    num_loads: int = 0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """The state of queue, cache and ranks at one moment. It is not changed afterwards.

    `headroom` is the number of requests that could start now, by their length in tokens or "max". `oldest_waiting_s` is the arrival
    time of the oldest request that no step has computed yet, in seconds since the epoch, or 0.
    """

    stats: CacheStats
    load: WorkerLoad
    work: WorkCounts
    headroom: dict[str, int] = field(default_factory=dict)
    policies: dict[str, PolicyStats] = field(default_factory=dict)  # by type of KV policy
    grammars: GrammarStats = GrammarStats()
    adapters: AdapterStats = AdapterStats()
    oldest_waiting_s: float = 0.0
    ranks: tuple[RankReport, ...] = ()

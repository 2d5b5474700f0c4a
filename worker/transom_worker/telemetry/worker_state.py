"""`WorkerState`: what a metrics scrape reads of an engine, published by the engine's thread a few times a second."""

from __future__ import annotations

from dataclasses import dataclass, field

from transom_core.contract import WorkerLoad
from transom_worker.execution.executor import RankReport
from transom_worker.kvcache.stats import CacheStats
from transom_worker.scheduling.work_counts import PolicyStats, WorkCounts


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
    oldest_waiting_s: float = 0.0
    ranks: tuple[RankReport, ...] = ()

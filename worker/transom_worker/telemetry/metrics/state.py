"""What a scrape reads of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # types alone: metrics depend on the metrics client and nothing else
    from transom_worker.contract import WorkerLoad
    from transom_worker.execution.executor import RankReport
    from transom_worker.kvcache.stats import CacheStats
    from transom_worker.scheduling.work_counts import WorkCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """Published by the engine's thread a few times a second, and not changed afterwards.

    Preemptions and the tokens that they threw away are by mode; `headroom` is the number of requests that could start now, by
    their length in tokens or "max"; `oldest_waiting_s` is when the one came that has waited longest for its first step, or 0.
    """

    stats: CacheStats
    load: WorkerLoad
    work: WorkCounts
    preemptions: dict[str, int] = field(default_factory=dict)
    preempted_tokens: dict[str, int] = field(default_factory=dict)
    headroom: dict[str, int] = field(default_factory=dict)
    oldest_waiting_s: float = 0.0
    ranks: tuple[RankReport, ...] = ()

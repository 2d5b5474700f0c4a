"""Reports on a worker's state: its load for routers and the autoscaler, and all figures that its metrics page reads at a scrape."""

from __future__ import annotations

from transom_core.contract import WorkerLoad
from transom_worker.engine.step_rates import StepRates
from transom_worker.execution.executor import RankReport
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.telemetry.worker_state import GrammarStats, WorkerState

HEADROOM_LENGTHS = (1024, 8192)  # tokens


def worker_load(scheduler: Scheduler, rates: StepRates) -> WorkerLoad:
    """How much a worker has to do now, and how fast it has been lately."""
    stats = scheduler.stats()
    used = sum(group.active_blocks * group.block_bytes for group in stats.groups)
    return WorkerLoad(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        max_num_seqs=scheduler.config.max_num_seqs,
        waiting_tokens=scheduler.waiting_tokens,
        used_share=used / max(1, stats.num_pages * stats.page_bytes),
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_step_s=rates.decode_step_s,
        first_token_s=rates.first_token_s,
        fetch_bytes_per_s=rates.fetch_bytes_per_s,
    )


def worker_state(
    scheduler: Scheduler,
    rates: StepRates,
    ranks: tuple[RankReport, ...],
    grammars: GrammarStats,
    *,
    oldest_waiting_s: float,
) -> WorkerState:
    """The state of queue, cache and ranks now. `oldest_waiting_s` is the arrival of the oldest request without a step, or 0."""
    return WorkerState(
        stats=scheduler.stats(),
        load=worker_load(scheduler, rates),
        work=scheduler.work.copy(),
        headroom=_headroom(scheduler),
        policies=scheduler.policy_stats(),
        grammars=grammars,
        ranks=ranks,
        oldest_waiting_s=oldest_waiting_s,
    )


def _headroom(scheduler: Scheduler) -> dict[str, int]:
    """Requests that could start now, by their length in tokens; `max` is the longest length that this worker serves."""
    longest = scheduler.max_model_len
    lengths = {str(length): length for length in HEADROOM_LENGTHS if length <= longest} | {"max": longest}
    return {name: scheduler.cache.capacity.num_that_fit(length) for name, length in lengths.items()}

"""What a worker has to do and how fast it is, for whoever chooses among workers."""

from __future__ import annotations

from transom_worker.contract import WorkerLoad
from transom_worker.engine.step_rates import StepRates
from transom_worker.scheduling.scheduler import Scheduler


def worker_load(scheduler: Scheduler, rates: StepRates) -> WorkerLoad:
    """As of now."""
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
    )

"""How many workers the load needs: pure, from what the workers say of themselves.

Each signal says how many workers would carry the present work, and the most demanding one decides. Fewer workers are wanted only
where the work would fill at most `FIT_SHARE` of them, so that one request more or less moves nothing. How long more or fewer must
be wanted before something happens is Serve's business (`upscale_delay_s`, `downscale_delay_s`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from transom_worker.config import AutoscalingConfig
from transom_worker.contract import WorkerLoad

FULL_BLOCKS_SHARE = 0.85  # of the KV pool; above it requests are preempted and prefixes forgotten
FULL_SEQS_SHARE = 0.9  # of max_num_seqs
FIT_SHARE = 0.7


def wanted_replicas(
    loads: Sequence[WorkerLoad], *, num_unplaced: int, num_target: int, config: AutoscalingConfig
) -> int:
    """The number of workers for this load, within the config's limits.

    `loads` are those of the workers that run, `num_unplaced` the requests that wait in routers because there is no worker, and
    `num_target` the workers that are to be there at present (some may still be starting).
    """
    objective_s = config.first_token_objective_s
    needed = max(_carrying(loads, objective_s, share=1.0), min(num_unplaced, 1))
    if _slowest_s(loads) > objective_s:
        needed = max(needed, len(loads) + 1)
    if needed < num_target:
        fitting = _carrying(loads, objective_s, share=FIT_SHARE)
        if _slowest_s(loads) > objective_s * FIT_SHARE:
            fitting = max(fitting, len(loads))
        needed = min(num_target, max(needed, fitting))
    return max(config.min_replicas, min(config.max_replicas, needed))


def _carrying(loads: Sequence[WorkerLoad], objective_s: float, *, share: float) -> int:
    """Workers that carry this load so that none does more than `share` of what it may."""
    full = max(
        _by_sequences(loads),
        sum(load.used_share for load in loads) / FULL_BLOCKS_SHARE,
        _by_backlog(loads, objective_s),
    )
    return max(math.ceil(full / share), 1) if _num_requests(loads) else 0


def _num_requests(loads: Sequence[WorkerLoad]) -> int:
    return sum(load.num_running + load.num_waiting for load in loads)


def _by_sequences(loads: Sequence[WorkerLoad]) -> float:
    return _num_requests(loads) / (FULL_SEQS_SHARE * max((load.max_num_seqs for load in loads), default=1))


def _by_backlog(loads: Sequence[WorkerLoad], objective_s: float) -> float:
    """Workers that compute all waiting tokens within the objective; 0 while no rate is known."""
    rates = [load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s > 0]
    if not rates:
        return 0.0
    return sum(load.waiting_tokens for load in loads) * len(rates) / (sum(rates) * objective_s)


def _slowest_s(loads: Sequence[WorkerLoad]) -> float:
    """The longest first-token time where requests queue for theirs; where none does, what was measured is of the past."""
    return max((load.first_token_s for load in loads if load.num_waiting), default=0.0)

"""The autoscaling policy: computes from the workers' load reports how many workers the load needs. Pure functions.

- **signal**: a reason for more workers: running slots, blocks of the KV pool, tokens that wait to be computed, or time to first
  token. Each signal gives the number of workers that could carry the present load, and the largest of these numbers decides.
- **objective**: the time to first token that requests should have (`first_token_objective_s`).

The policy asks for fewer workers only if the load would fill at most `FIT_SHARE` of them, so that one request more or less does not
change the number. For example, a load that fills 2.0 of 4 workers needs 2 / 0.7 = 2.9 workers, so 3 stay.

Ray Serve acts only after the policy has asked for more or fewer workers for some time (`upscale_delay_s`, `downscale_delay_s`).
"""

import math
from collections.abc import Sequence

from transom_core.config import AutoscalingConfig
from transom_core.contract import WorkerLoad

# A worker counts as full at this share of its KV pool (above it, requests are preempted and cached prefixes evicted), and at this
# share of `max_num_seqs` (above it, requests soon wait for a running slot).
FULL_BLOCKS_SHARE = 0.85
FULL_SEQS_SHARE = 0.9
FIT_SHARE = 0.7  # see the module's docstring


def wanted_replicas(
    loads: Sequence[WorkerLoad], *, num_unplaced: int, num_target: int, config: AutoscalingConfig
) -> int:
    """Return the number of workers that the load needs, within the config's limits.

    `loads` has the load reports of the running workers. `num_unplaced` is the number of requests that wait in routers because no
    worker runs. `num_target` is the number of workers that Ray Serve aims at now; some of them may still be starting.
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
    """Return the number of workers that carry this load with at most `share` of their capacity."""
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
    """Return the number of workers that compute all waiting tokens within the objective; 0 while no worker has measured its rate.

    `sum(rates) / len(rates)` is the mean rate, so one worker computes that many tokens times `objective_s` within the objective.
    """
    rates = [load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s > 0]
    if not rates:
        return 0.0
    return sum(load.waiting_tokens for load in loads) * len(rates) / (sum(rates) * objective_s)


def _slowest_s(loads: Sequence[WorkerLoad]) -> float:
    """Return the longest time to first token among workers that have a queue. A worker without a queue measured its time in the
    past, so it says nothing about the present load."""
    return max((load.first_token_s for load in loads if load.num_waiting), default=0.0)

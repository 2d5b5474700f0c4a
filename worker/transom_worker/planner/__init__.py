"""Plans a model's KV cache from its config: groups, blocks, pages, and how many requests fit. Plans are integers, without tensors.

A *group* is a set of layers that keep the same tokens for the same time; the KV memory is divided into *pages*, each leased to one
group at a time. `plan_from_config` makes a plan from a `config.json`; the engine calls the same `cache_groups` and `plan_cache` for
the model that it loaded.
"""

from transom_worker.planner.blocks import cache_groups, rank_layout
from transom_worker.planner.layer_groups import check_runs
from transom_worker.planner.pages import make_layout
from transom_worker.planner.plan import (
    CachePlan,
    Concurrency,
    GroupPlan,
    plan_cache,
    plan_from_config,
    with_rank_shares,
)

__all__ = [
    "CachePlan",
    "Concurrency",
    "GroupPlan",
    "cache_groups",
    "check_runs",
    "make_layout",
    "plan_cache",
    "plan_from_config",
    "rank_layout",
    "with_rank_shares",
]

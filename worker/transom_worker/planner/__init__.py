"""Plans a model's KV cache from its config: groups, blocks, pages, and how many requests fit. Integers only.

`plan_from_config` plans from a `config.json`; the engine calls the same `cache_groups` and `plan_cache` for the model that it
loaded.
"""

from transom_worker.planner.blocks import cache_groups, kv_dtype, rank_layout
from transom_worker.planner.pages import make_layout
from transom_worker.planner.plan import CachePlan, Concurrency, GroupPlan, plan_cache, plan_from_config, with_shares

__all__ = [
    "CachePlan",
    "Concurrency",
    "GroupPlan",
    "cache_groups",
    "kv_dtype",
    "make_layout",
    "plan_cache",
    "plan_from_config",
    "rank_layout",
    "with_shares",
]

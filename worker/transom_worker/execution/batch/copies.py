"""Block copies of a plan, done before its forward pass."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

import torch

from transom_kernels.block_copy import block_copy
from transom_worker.execution.batch.slab import block_rows
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.scheduling.step import TIER_DEVICE, StepPlan


def run_copies(plan: StepPlan, layout: ArenaLayout, slab: torch.Tensor) -> int:
    """Copy whole blocks inside the slab, in the plan's order; returns how many.

    Raises:
        ValueError: a copy names another tier than the device's.
    """
    if any(tier != TIER_DEVICE for tier in (*plan.copy_source_tier, *plan.copy_target_tier)):
        raise ValueError("A plan copies blocks to or from the host tier, which is not supported yet.")
    copies = zip(plan.copy_group, plan.copy_source, plan.copy_target, strict=True)
    # one group at a time only where the plan does: a page emptied by copies may be another group's target behind them
    for group, run in groupby(copies, key=itemgetter(0)):
        block_copy(block_rows(layout, slab, group), [(source, target) for _, source, target in run])
    return len(plan.copy_group)

"""Copies whole blocks inside the slab, as a plan asks, before the plan's forward pass."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

import torch

from transom_kernels.block_copy import block_copy
from transom_worker.execution.batch.slab import block_rows
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.scheduling.step import TIER_DEVICE, StepPlan


def run_copies(plan: StepPlan, layout: ArenaLayout, slab: torch.Tensor) -> int:
    """Copy blocks in the plan's order, and return how many.

    Raises:
        ValueError: a copy names another tier than the device's.
    """
    if any(tier != TIER_DEVICE for tier in (*plan.copy_source_tier, *plan.copy_target_tier)):
        raise ValueError("A plan copies blocks to or from the host tier, which is not supported yet.")
    copies = zip(plan.copy_group, plan.copy_source, plan.copy_target, strict=True)
    # The order across groups matters: copies may empty a page, which later copies of another group then use as their target. So
    # only neighbouring copies of one group are done together.
    for group, run in groupby(copies, key=itemgetter(0)):
        block_copy(block_rows(layout, slab, group), [(source, target) for _, source, target in run])
    return len(plan.copy_group)

"""Block copies of a plan, done before its forward pass."""

from __future__ import annotations

import torch

from transom_kernels.block_copy import block_copy
from transom_worker.execution.slab import block_rows
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.scheduling.step import TIER_DEVICE, StepPlan


def run_copies(plan: StepPlan, layout: ArenaLayout, slab: torch.Tensor) -> int:
    """Copy whole blocks inside the slab, in the plan's order; returns how many.

    Raises:
        ValueError: a copy names another tier than the device's.
    """
    if any(tier != TIER_DEVICE for tier in (*plan.copy_source_tier, *plan.copy_target_tier)):
        raise ValueError("A plan copies blocks to or from the host tier, which is not supported yet.")
    pairs: dict[int, list[tuple[int, int]]] = {}
    for group, source, target in zip(plan.copy_group, plan.copy_source, plan.copy_target, strict=True):
        pairs.setdefault(group, []).append((source, target))
    for group, copies in pairs.items():  # groups share no bytes, so only the order inside each one matters
        block_copy(block_rows(layout, slab, group), copies)
    return len(plan.copy_group)

"""The operator `position_scale`: 1 + factor * log(1 + floor((p + 1) / interval)) of each position p.

Legend: T tokens.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.position_scale.reference import position_scale_reference


def position_scale(positions: torch.Tensor, *, factor: float, interval: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the factors [T] of `positions` [T] int64, computed in float32 and rounded to `dtype`.

    Raises:
        ValueError: the interval is below 1.
    """
    if interval < 1:
        raise ValueError(f"interval is {interval}; give at least 1.")
    if uses_cpu_kernels(positions):
        from transom_kernels.position_scale.cpu import position_scale_cpu, position_scale_fits

        if position_scale_fits(positions, dtype):
            return position_scale_cpu(positions, factor=factor, interval=interval, dtype=dtype)
    return position_scale_reference(positions, factor=factor, interval=interval, dtype=dtype)

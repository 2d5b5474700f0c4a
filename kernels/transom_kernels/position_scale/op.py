"""The operator `position_scale`: the factor that Llama 4's layers without RoPE multiply queries by. It grows with the position p:

    1 + factor * log(1 + floor((p + 1) / interval))

Legend: T tokens.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import uses_cpu_kernels


def position_scale(positions: torch.Tensor, *, factor: float, interval: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the factors [T] of `positions` [T] int64, computed in float32 and rounded to `dtype`.

    Raises:
        ValueError: the interval is below 1.
    """
    if interval < 1:
        raise ValueError(f"interval is {interval}; give at least 1.")
    if uses_cpu_kernels(positions):
        from transom_kernels.position_scale.cpu import fits_cpu, position_scale_cpu

        if fits_cpu(positions, dtype):
            return position_scale_cpu(positions, factor=factor, interval=interval, dtype=dtype)
    return position_scale_reference(positions, factor=factor, interval=interval, dtype=dtype)


def position_scale_reference(
    positions: torch.Tensor, *, factor: float, interval: int, dtype: torch.dtype
) -> torch.Tensor:
    """Compute `position_scale` in torch: the specification."""
    intervals_T = ((positions.float() + 1.0) / interval).floor()
    return (intervals_T.log1p() * factor + 1.0).to(dtype)

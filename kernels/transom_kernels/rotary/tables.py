"""The operator `rotary_tables`: the cosines and signed sines of some positions, as `rotary_` takes them.

Legend: T tokens, R rotated width.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import uses_cpu_kernels


def rotary_tables(
    positions: torch.Tensor, frequency: torch.Tensor, sign: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos(position * frequency) * scale and sin(position * frequency) * sign * scale, each [T, 1, R] in `dtype`.

    `positions` is [T] int64; `frequency` and `sign` are [R] float32. Everything is computed in float32, and rounded once.
    """
    if uses_cpu_kernels(positions):
        from transom_kernels.rotary.cpu import rotary_tables_cpu, tables_fit

        if tables_fit(positions, frequency, sign, dtype):
            return rotary_tables_cpu(positions, frequency, sign, dtype, scale)
    angles = positions.to(torch.float32)[:, None] * frequency
    cos, signed_sin = angles.cos(), angles.sin().mul_(sign)
    if scale != 1.0:
        cos, signed_sin = cos.mul_(scale), signed_sin.mul_(scale)
    return cos.to(dtype)[:, None], signed_sin.to(dtype)[:, None]

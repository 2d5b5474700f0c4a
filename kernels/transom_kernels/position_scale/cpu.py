"""Launch of the CPU kernel of `position_scale`.

Legend: T tokens.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch

ITEM_TOKENS = 32  # most tokens of one item of work


def position_scale_fits(positions: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel takes these dtypes and strides."""
    return positions.dtype == torch.int64 and positions.is_contiguous() and dtype in DTYPES


def position_scale_cpu(positions: torch.Tensor, *, factor: float, interval: int, dtype: torch.dtype) -> torch.Tensor:
    """The contract is that of `op.position_scale`."""
    out = empty((len(positions),), dtype)
    kernel = cpu_kernel("transom_kernels.position_scale.cpu_kernel", "make_position_scale", dtype=DTYPES[dtype])
    num_tokens = len(positions)
    launch(
        kernel,
        -(-num_tokens // ITEM_TOKENS),
        [positions, out, num_tokens, ITEM_TOKENS, float(factor), float(interval)],
    )
    return out

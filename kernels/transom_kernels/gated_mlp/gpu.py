"""Launch of the gated activation kernel.

Legend: T tokens, N inner width.
"""

from __future__ import annotations

import torch

from transom_kernels.gated_mlp.kernel import activate
from transom_kernels.launch import next_power_of_two

MOST_ELEMENTS = 2048  # of a row that a program computes


def gated_activation_triton(gate_up: torch.Tensor, *, gelu: bool, limit: float | None = None) -> torch.Tensor:
    """The contract is that of `op.gated_activation`."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    rows = gate_up.reshape(-1, 2 * width)
    block = min(MOST_ELEMENTS, next_power_of_two(width))
    if len(rows):
        activate[(len(rows), -(-width // block))](
            rows, out, rows.stride(0), width, 0.0 if limit is None else limit,
            GELU=gelu, HAS_LIMIT=limit is not None, BLOCK_N=block, num_warps=4,
        )  # fmt: skip
    return out

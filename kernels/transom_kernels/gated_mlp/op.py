"""`gated_silu`: silu(gate) * up, of one fused projection.

Legend: T tokens, N inner width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate_up[:, :N]) * gate_up[:, N:]` [T, N] of `gate_up` [T, 2N].

    Raises:
        ValueError: an odd width.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has width {gate_up.shape[-1]}; it must be gate and up, equally wide.")
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)

"""silu(gate) * up in float32: the specification of `gated_silu`."""

from __future__ import annotations

import torch


def gated_silu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """See `op.gated_silu`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)

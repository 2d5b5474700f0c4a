"""activation(gate) * up in float32: the specification of `gated_activation`."""

from __future__ import annotations

import math

import torch


def gated_silu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The contract is that of `op.gated_silu`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gated_gelu_tanh_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The contract is that of `op.gated_activation`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1 + torch.tanh(inner)) * up).to(gate_up.dtype)

"""The operators `gated_activation` and `activated_product`: activation(gate) * up. With silu this is SwiGLU, with gelu_tanh GEGLU.

`gated_activation` takes gate and up as one tensor, the result of one projection; `activated_product` takes two tensors.

Legend: T tokens, N inner width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch

from transom_kernels.launch import uses_cpu_kernels, uses_triton

Activation = Literal["silu", "gelu_tanh"]


def gated_activation(gate_up: torch.Tensor, activation: Activation, limit: float | None = None) -> torch.Tensor:
    """Return `activation(gate_up[:, :N]) * gate_up[:, N:]` [T, N] of `gate_up` [T, 2 N].

    With `limit`, gates are first clamped to at most `limit`, and ups to [-limit, limit].

    Raises:
        ValueError: the width of `gate_up` is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has width {gate_up.shape[-1]}; it must be gate and up, equally wide.")
    if uses_triton(gate_up):
        return _triton()(gate_up, gelu=activation == "gelu_tanh", limit=limit)
    gate, up = gate_up.chunk(2, dim=-1)
    return _product(gate, up, activation, limit)


def activated_product(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return `activation(gate) * up` [T, N] of two tensors [T, N], which may have any strides.

    Raises:
        ValueError: the shapes differ.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must be equally large.")
    return _product(gate, up, activation, None)


def activated_product_reference(
    gate: torch.Tensor, up: torch.Tensor, activation: Activation, limit: float | None = None
) -> torch.Tensor:
    """Compute both operators in torch, in float32 and rounded once: the specification."""
    wide_gate, wide_up = gate.float(), up.float()
    if limit is not None:
        wide_gate, wide_up = wide_gate.clamp(max=limit), wide_up.clamp(-limit, limit)
    if activation == "silu":
        share = torch.sigmoid(wide_gate)
    else:
        share = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide_gate + 0.044715 * wide_gate**3)))
    return (wide_gate * share * wide_up).to(gate.dtype)


def _product(gate: torch.Tensor, up: torch.Tensor, activation: Activation, limit: float | None) -> torch.Tensor:
    if uses_cpu_kernels(gate):
        from transom_kernels.gated_mlp.cpu import activated_product_cpu, fits_cpu

        if fits_cpu(gate, up):
            return activated_product_cpu(gate, up, activation, limit)
    return activated_product_reference(gate, up, activation, limit)


@cache
def _triton() -> Callable[..., torch.Tensor]:
    """Return the implementation. It is imported once, here: an import statement would cost every call a microsecond."""
    from transom_kernels.gated_mlp.gpu import gated_activation_triton

    return gated_activation_triton

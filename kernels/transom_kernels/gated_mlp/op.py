"""The operators `gated_activation` and `activated_product`: activation(gate) * up, where one projection gives gate and up, or two
do.

Legend: T tokens, N inner width.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from transom_kernels.launch import uses_cpu_kernels, uses_triton

Activation = Literal["silu", "gelu_tanh"]


def gated_activation(gate_up: torch.Tensor, activation: Activation, limit: float | None = None) -> torch.Tensor:
    """`activation(gate_up[:, :N]) * gate_up[:, N:]` [T, N] of `gate_up` [T, 2 N].

    With `limit` gates are clamped to at most `limit`, and ups to [-limit, limit], before the activation.

    Raises:
        ValueError: the width of `gate_up` is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has width {gate_up.shape[-1]}; it must be gate and up, equally wide.")
    if uses_triton(gate_up):
        from transom_kernels.gated_mlp.gpu import gated_activation_triton

        return gated_activation_triton(gate_up, gelu=activation == "gelu_tanh", limit=limit)
    gate, up = gate_up.chunk(2, dim=-1)
    if uses_cpu_kernels(gate_up):
        from transom_kernels.gated_mlp.cpu import activated_product_cpu, activated_product_fits

        if activated_product_fits(gate, up):
            return activated_product_cpu(gate, up, activation, limit)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh").mul_(up)


def activated_product(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activation(gate) * up` [T, N] of two tensors [T, N], which may have strides.

    Raises:
        ValueError: the shapes differ.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must be equally large.")
    if uses_cpu_kernels(gate):
        from transom_kernels.gated_mlp.cpu import activated_product_cpu, activated_product_fits

        if activated_product_fits(gate, up):
            return activated_product_cpu(gate, up, activation)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """`gated_activation` with silu (SwiGLU)."""
    return gated_activation(gate_up, "silu")

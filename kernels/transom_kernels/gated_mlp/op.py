"""The operators `gated_activation` and `activated_product`: activation(gate) * up. With silu this is SwiGLU, with gelu_tanh GEGLU.

`gated_activation` takes gate and up as one tensor, the result of one projection; `activated_product` takes two tensors. The
activation `relu2` has no gate: its result is relu(up) ** 2, and the projection is that of ups alone.

Legend: T tokens, N inner width.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.rows import limited_gate, limited_up, make_gated
from transom_kernels.cpu.simd import float_of_bits, row_access
from transom_kernels.cpu.work import argument, each_item, helper
from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton

Activation = Literal["silu", "gelu_tanh", "relu2"]
Limits = tuple[float, float]  # (g, u): gates are clamped to at most g, and ups to [-u, u]


def gated_activation(gate_up: torch.Tensor, activation: Activation, limits: Limits | None = None) -> torch.Tensor:
    """Return `activation(gate_up[:, :N]) * gate_up[:, N:]` [T, N] of `gate_up` [T, 2 N].

    With `limits`, gates and ups are clamped first. With `relu2` return `relu(up) ** 2` [T, N] of ups [T, N].

    Raises:
        ValueError: the width of `gate_up` is odd.
    """
    has_gate = activation != "relu2"
    if has_gate and gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has width {gate_up.shape[-1]}; give an even width: a gate and an up of equal width.")
    if uses_triton(gate_up):
        by_triton: Callable[..., torch.Tensor] = implementation("gated_mlp.gpu", "gated_activation_triton")
        return by_triton(gate_up, activation, limits)
    gate, up = gate_up.chunk(2, dim=-1) if has_gate else (gate_up, gate_up)
    return _product(gate, up, activation, limits)


def activated_product(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return `activation(gate) * up` [T, N] of two tensors [T, N], which may have any strides.

    Raises:
        ValueError: the shapes differ.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must be equally large.")
    return _product(gate, up, activation, None)


def activated_product_reference(
    gate: torch.Tensor, up: torch.Tensor, activation: Activation, limits: Limits | None = None
) -> torch.Tensor:
    """Compute both operators in torch, in float32 and rounded once: the specification."""
    wide_gate, wide_up = gate.float(), up.float()
    if limits is not None:
        wide_gate, wide_up = wide_gate.clamp(max=limits[0]), wide_up.clamp(-limits[1], limits[1])
    if activation == "relu2":
        return wide_up.relu().square().to(up.dtype)
    if activation == "silu":
        share = torch.sigmoid(wide_gate)
    else:
        share = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide_gate + 0.044715 * wide_gate**3)))
    return (wide_gate * share * wide_up).to(gate.dtype)


def _product(gate: torch.Tensor, up: torch.Tensor, activation: Activation, limits: Limits | None) -> torch.Tensor:
    if uses_cpu_kernels(gate) and fits_cpu(gate, up):
        return activated_product_cpu(gate, up, activation, limits)
    return activated_product_reference(gate, up, activation, limits)


# --- the CPU kernel and its launch

ITEM_ELEMENTS = 1024  # most elements of a row in one work item; a multiple of 16


def fits_cpu(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Return whether the kernel takes these dtypes and strides."""
    return gate.dtype == up.dtype and gate.dtype in DTYPES and gate.dim() == 2 and gate.stride(1) == up.stride(1) == 1


def activated_product_cpu(
    gate: torch.Tensor, up: torch.Tensor, activation: str, limits: Limits | None = None
) -> torch.Tensor:
    """Return `activation(gate) * up` [T, N], with gates and ups clamped first if there are `limits`."""
    rows, width = gate.shape
    out = empty((rows, width), gate.dtype)
    kernel = cpu_kernel(
        "transom_kernels.gated_mlp.op",
        "make_activate",
        dtype=DTYPES[gate.dtype],
        activation=activation,
        limited=limits is not None,
    )
    strides = [part.stride(0) * part.element_size() for part in (gate, up)]
    bounds = map(float, limits or (0.0, 0.0))
    launch(kernel, rows * -(-width // ITEM_ELEMENTS), [gate, up, out, width, ITEM_ELEMENTS, *strides, *bounds])
    return out


def make_activate(dtype: str, activation: str, limited: bool) -> Any:
    """Build the kernel. A work item is a part of one row.

    Argument words: 0 gate, 1 up, 2 out (contiguous), 3 N, 4 width of an item (a multiple of 16), 5 row stride of gate in bytes,
    6 that of up, 7 limit of gates, 8 limit of ups.
    """
    load, store, size = row_access(dtype)
    gated = make_gated(activation)

    @helper
    def activated(gate, up, gate_limit, up_limit):
        if limited:
            gate, up = limited_gate(gate, gate_limit), limited_up(up, up_limit)
        return gated(gate, up)

    @each_item
    def activate(arguments, thread, item):
        width, step = argument(arguments, 3), argument(arguments, 4)
        gate_limit, up_limit = float_of_bits(argument(arguments, 7)), float_of_bits(argument(arguments, 8))
        parts = (width + step - 1) // step
        row, first = item // parts, item % parts * step
        gate = argument(arguments, 0) + row * argument(arguments, 5)
        up = argument(arguments, 1) + row * argument(arguments, 6)
        out = argument(arguments, 2) + row * width * size
        last = min(first + step, width)
        for n in range(first, last, 16):
            at, count = n * size, last - n
            gates, ups = load(gate + at, count), load(up + at, count)
            store(out + at, activated(gates, ups, gate_limit, up_limit), count)

    return activate

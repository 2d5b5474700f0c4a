"""Gated activations on CPUs: out[t, n] = activation(gate[t, n]) * up[t, n], in float32.

Legend: T tokens, N inner width.
"""

from __future__ import annotations

from typing import Any

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.rows import limited_gate, limited_up, make_gated
from transom_kernels.cpu.simd import float_of_bits, row_access
from transom_kernels.cpu.work import argument, each_item, helper

ITEM_ELEMENTS = 1024  # most elements of a row in one work item; a multiple of 16


def fits_cpu(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Return whether the kernel takes these dtypes and strides."""
    return gate.dtype == up.dtype and gate.dtype in DTYPES and gate.dim() == 2 and gate.stride(1) == up.stride(1) == 1


def activated_product_cpu(
    gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float | None = None
) -> torch.Tensor:
    """Return `activation(gate) * up` [T, N]; with `limit`, gates are first clamped to at most it and ups to [-limit, limit]."""
    rows, width = gate.shape
    out = empty((rows, width), gate.dtype)
    kernel = cpu_kernel(
        "transom_kernels.gated_mlp.cpu",
        "make_activate",
        dtype=DTYPES[gate.dtype],
        activation=activation,
        limited=limit is not None,
    )
    strides = [part.stride(0) * part.element_size() for part in (gate, up)]
    bound = 0.0 if limit is None else float(limit)
    launch(kernel, rows * -(-width // ITEM_ELEMENTS), [gate, up, out, width, ITEM_ELEMENTS, *strides, bound])
    return out


def make_activate(dtype: str, activation: str, limited: bool) -> Any:
    """Build the kernel. A work item is a part of one row.

    Arguments: 0 gate, 1 up, 2 out (contiguous), 3 N, 4 width of an item (a multiple of 16), 5 row stride of gate in bytes, 6 that
    of up, 7 limit.
    """
    load, load_part, store, store_part, size = row_access(dtype)
    gated = make_gated(activation)

    @helper
    def activated(gate, up, limit):
        if limited:
            gate, up = limited_gate(gate, limit), limited_up(up, limit)
        return gated(gate, up)

    @each_item
    def activate(arguments, thread, item):
        width, step, limit = argument(arguments, 3), argument(arguments, 4), float_of_bits(argument(arguments, 7))
        parts = (width + step - 1) // step
        row, first = item // parts, item % parts * step
        gate = argument(arguments, 0) + row * argument(arguments, 5)
        up = argument(arguments, 1) + row * argument(arguments, 6)
        out = argument(arguments, 2) + row * width * size
        last = min(first + step, width)
        full = last // 16 * 16
        for n in range(first, full, 16):
            store(out + n * size, activated(load(gate + n * size), load(up + n * size), limit))
        if last > full:
            at, rest = full * size, last - full
            store_part(out + at, activated(load_part(gate + at, rest), load_part(up + at, rest), limit), rest)

    return activate

"""Launch of the CPU kernel of gated activations.

Legend: T tokens, N inner width.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch

ITEM_ELEMENTS = 1024  # most elements of a row that are one item of work; a multiple of 16


def activated_product_fits(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether the kernel takes these dtypes and strides."""
    return gate.dtype == up.dtype and gate.dtype in DTYPES and gate.dim() == 2 and gate.stride(1) == up.stride(1) == 1


def activated_product_cpu(
    gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float | None = None
) -> torch.Tensor:
    """The contract is that of `op.activated_product`, with the limit of `op.gated_activation`."""
    rows, width = gate.shape
    out = empty((rows, width), gate.dtype)
    kernel = cpu_kernel(
        "transom_kernels.gated_mlp.cpu_kernel",
        "make_activate",
        dtype=DTYPES[gate.dtype],
        activation=activation,
        limited=limit is not None,
    )
    strides = [part.stride(0) * part.element_size() for part in (gate, up)]
    bound = 0.0 if limit is None else float(limit)
    launch(kernel, rows * -(-width // ITEM_ELEMENTS), [gate, up, out, width, ITEM_ELEMENTS, *strides, bound])
    return out

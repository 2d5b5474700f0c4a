"""Launch of the CPU kernel of `layer_norm`.

Legend: T rows, N width.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch

ITEM_ELEMENTS = 2048  # about as many elements as one item of work normalises


def layer_norm_fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes these dtypes and strides."""
    return x.dtype in DTYPES and x.dtype == weight.dtype and x.dim() == 2 and x.stride(1) == weight.stride(0) == 1


def layer_norm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The contract is that of `op.layer_norm`."""
    rows, width = x.shape
    out = empty(x.shape, x.dtype)
    per_item = max(1, ITEM_ELEMENTS // width)
    kernel = cpu_kernel("transom_kernels.layer_norm.cpu_kernel", "make_layer_norm", dtype=DTYPES[x.dtype])
    launch(kernel, -(-rows // per_item), [x, weight, out, rows, per_item, width, x.stride(0) * x.element_size(), eps])
    return out

"""The operator `layer_norm`: (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias of each row, in float32. CPUs compute it
with a kernel, GPUs with torch.

Legend: T rows, N width.
"""

from typing import Any

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.simd import float_of_bits, fma, keep_part, lane_sum, row_access, splat, sqrt
from transom_kernels.cpu.work import argument, each_item, helper
from transom_kernels.launch import uses_cpu_kernels


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the normalised rows of `x` [T, N], rounded once; `weight` and `bias` are [N] in the dtype of `x`.

    Raises:
        ValueError: the width does not fit.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}.")
    if uses_cpu_kernels(x) and fits_cpu(x, weight):
        return layer_norm_cpu(x, weight, eps, bias)
    return layer_norm_reference(x, weight, eps, bias)


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `layer_norm` in torch: the specification."""
    wide = x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (centred * scale * weight.float() + (0.0 if bias is None else bias.float())).to(x.dtype)


# --- the CPU kernel and its launch

ITEM_ELEMENTS = 2048  # about as many elements as one work item normalises


def fits_cpu(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the kernel takes these dtypes and strides."""
    return x.dtype in DTYPES and x.dtype == weight.dtype and x.dim() == 2 and x.stride(1) == weight.stride(0) == 1


def layer_norm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias of each row of `x` [T, N], for `weight` and `bias` [N]."""
    rows, width = x.shape
    out = empty(x.shape, x.dtype)
    per_item = max(1, ITEM_ELEMENTS // width)
    kernel = cpu_kernel("transom_kernels.layer_norm", "make_layer_norm", dtype=DTYPES[x.dtype])
    stride = x.stride(0) * x.element_size()
    launch(kernel, -(-rows // per_item), [x, weight, out, rows, per_item, width, stride, eps, bias])
    return out


def make_layer_norm(dtype: str) -> Any:
    """Build the kernel. A work item is a group of rows.

    Argument words: 0 x, 1 weight, 2 out, contiguous, 3 T, 4 rows of an item, 5 N, 6 x's row stride in bytes, 7 eps,
    8 bias or 0.
    """
    load, store, size = row_access(dtype)

    @helper
    def normalise(x, weight, bias, out, width, eps):
        total = splat(0.0)
        for k in range(0, width, 16):
            total = total + load(x + k * size, width - k)
        mean = splat(lane_sum(total) / width)
        total = splat(0.0)
        for k in range(0, width, 16):
            # lanes after the row must add nothing: they would be -mean
            centred = keep_part(load(x + k * size, width - k) - mean, width - k, 0.0)
            total = fma(centred, centred, total)
        scale = splat(1.0 / sqrt(lane_sum(total) / width + eps))
        for k in range(0, width, 16):
            lanes = (load(x + k * size, width - k) - mean) * scale * load(weight + k * size, width - k)
            if bias != 0:
                lanes = lanes + load(bias + k * size, width - k)
            store(out + k * size, lanes, width - k)

    @each_item
    def layer_norm(arguments, thread, item):
        width, eps = argument(arguments, 5), float_of_bits(argument(arguments, 7))
        first = item * argument(arguments, 4)
        for row in range(first, min(first + argument(arguments, 4), argument(arguments, 3))):
            x = argument(arguments, 0) + row * argument(arguments, 6)
            out = argument(arguments, 2) + row * width * size
            normalise(x, argument(arguments, 1), argument(arguments, 8), out, width, eps)

    return layer_norm

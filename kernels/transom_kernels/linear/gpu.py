"""Quantised weights of linear layers on GPUs, and the products with them.

Weights are widened to bfloat16 in registers (`moe.widening`), and a product is summed in float32. But fp8 with a scale for each
output is multiplied in fp8 if the checkpoint was made for that: rows of x are rounded to fp8, too, with the checkpoint's scale or
one of their own, and torch multiplies them.

Legend: M rows, K input width, N output width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from transom_kernels.launch import capability_of, implementation, uses_triton
from transom_kernels.moe.gpu_weights import arranged
from transom_kernels.moe.weights import GpuMatrix
from transom_kernels.quantised_linear import GpuRows

LARGEST_FP8 = 448.0
_LEAST_SCALE = 1e-12  # of rows that are all zeros


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpuWeight:
    """A quantised weight [N, K] and its bias: arranged for the Triton kernel, or in rows where torch computes."""

    matrix: GpuMatrix | GpuRows
    bias: torch.Tensor | None  # [N] float32
    order: torch.Tensor | None  # [K]: column k multiplies column `order[k]` of x
    rounds_inputs: bool  # to fp8
    input_scale: torch.Tensor | None  # [1, 1] float32; None: each row has its own
    num_outputs: int
    width: int
    nbytes: int
    is_gated = False

    @property
    def format(self) -> str:
        """The numbers' name."""
        return self.matrix.numbers


def gpu_weight(rows: GpuRows, bias: torch.Tensor | None = None) -> GpuWeight:
    """Arrange a weight for the device that it is on."""
    (outputs, width), inputs = rows.levels.shape, rows.input_scales
    is_arranged = rows.levels.is_meta or uses_triton(rows.levels)
    has_fp8 = not is_arranged or capability_of(rows.levels.device) >= (8, 9)
    rounds_inputs = inputs is not None and has_fp8 and outputs % 16 == width % 32 == 0
    order_bytes = 0 if rows.order is None else rows.order.nbytes
    scale_bytes = 0 if rows.row_scales is None else rows.row_scales.nbytes
    matrix = rows if rounds_inputs or not is_arranged else arranged([rows])
    is_static = rounds_inputs and inputs is not None and bool(inputs.all())
    return GpuWeight(
        matrix=matrix,
        bias=None if bias is None else bias.float(),
        order=rows.order,
        rounds_inputs=rounds_inputs,
        input_scale=inputs.max().view(1, 1) if is_static and inputs is not None else None,
        num_outputs=outputs,
        width=width,
        nbytes=order_bytes + (matrix.nbytes if isinstance(matrix, GpuMatrix) else rows.levels.nbytes + scale_bytes),
    )


def linear_gpu(x: torch.Tensor, weight: GpuWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return `x @ weight.T + bias` [M, N] in `dtype` of `x` [M, K]; with scales for inputs, of `x` rounded to fp8."""
    matrix = weight.matrix
    if isinstance(matrix, GpuMatrix):
        x = x if weight.order is None else x.index_select(1, weight.order)
        x = x if x.stride(1) == 1 else x.contiguous()
        out: torch.Tensor = implementation("moe.gpu", "dense_triton")(x, matrix, weight.bias, dtype)
        return out
    if weight.rounds_inputs:
        return _fp8_product(x, matrix, weight, dtype)
    return F.linear(x.float(), matrix.dequantised(), weight.bias).to(dtype)


def _fp8_product(x: torch.Tensor, rows: GpuRows, weight: GpuWeight, dtype: torch.dtype) -> torch.Tensor:
    assert rows.row_scales is not None
    if weight.input_scale is None:
        scale_M1 = (x.abs().amax(dim=1, keepdim=True).float() / LARGEST_FP8).clamp(min=_LEAST_SCALE)
    else:
        scale_M1 = weight.input_scale.expand(len(x), 1).contiguous()
    rounded = (x.float() / scale_M1).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    weight_KN, scale_1N = rows.levels.view(torch.float8_e4m3fn).t(), rows.row_scales[None]
    y: torch.Tensor = torch._scaled_mm(rounded, weight_KN, scale_M1, scale_1N, out_dtype=torch.bfloat16)
    return (y if weight.bias is None else y.float() + weight.bias).to(dtype)

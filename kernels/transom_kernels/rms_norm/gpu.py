"""RMS normalisation on GPUs: `norm_rows`, one program per row.

rms_norm(x, weight) = x / sqrt(mean(x ** 2) + eps) * weight, computed in float32.

Legend: T rows, N row width.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from transom_kernels.launch import next_power_of_two, warps_for
from transom_kernels.prepared_launch import PreparedLaunch


def rms_norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    inner: torch.Tensor | None = None,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rms_norm(sum, weight) and the sum, both [T, N]; sum = (residual + rms_norm(x, inner)) * factor.

    Without `residual` the sum is `x`, without `inner` it is (residual + x) * factor, without `weight` both results are the sum.
    """
    rows, width = x.shape
    sums = x if residual is None else x.new_empty(rows, width)
    out = sums if weight is None else x.new_empty(rows, width)
    if rows:
        strides = x.stride(0), 0 if residual is None else residual.stride(0)
        launch = _launch(width, strides, factor, eps, inner is not None, residual is not None, weight is not None)
        # `x` stands in for absent tensors, which the kernel does not read
        vectors = x if inner is None else inner, x if weight is None else weight
        launch((rows, 1, 1), (x, x if residual is None else residual, *vectors, out, sums))
    return out, sums


@cache
def _launch(
    width: int,
    strides: tuple[int, int],
    factor: float,
    eps: float,
    has_inner: bool,
    has_residual: bool,
    has_weight: bool,
) -> PreparedLaunch:
    block = next_power_of_two(width)
    arguments = {
        "x_stride": strides[0],
        "residual_stride": strides[1],
        "factor": factor,
        "eps": eps,
        "N": width,
        "HAS_INNER": has_inner,
        "HAS_RESIDUAL": has_residual,
        "HAS_WEIGHT": has_weight,
        "BLOCK_N": block,
    }
    return PreparedLaunch(norm_rows, arguments, num_warps=warps_for(block))


@triton.jit
def _normalised(values, weight, n, inside, eps, N: tl.constexpr):
    """Return rms_norm(values, weight) of one row of float32 values [BLOCK_N]."""
    scale = tl.rsqrt(tl.sum(values * values, 0) / N + eps)
    return values * scale * tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def norm_rows(
    x,  # [T, N]
    residual,  # [T, N], or unused
    inner,  # [N] weight of the norm before the sum, or unused
    weight,  # [N] weight of the norm of the sum, or unused
    out,  # [T, N], or unused
    sums,  # [T, N], or unused
    x_stride,
    residual_stride,
    factor,
    eps,
    N: tl.constexpr,
    HAS_INNER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute one row: y = rms_norm(x, inner); sum = (residual + y) * factor; out = rms_norm(sum, weight). The grid is (T).

    Steps whose flag is off are left out: without `inner` y is x, without `residual` the sum is y. Values are rounded wherever
    separate operators would have written a tensor, so that results equal theirs.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    inside = n < N
    # load, normalise by `inner`
    values = tl.load(x + row * x_stride + n, mask=inside, other=0.0).to(tl.float32)
    if HAS_INNER:
        values = _normalised(values, inner, n, inside, eps, N).to(sums.dtype.element_ty).to(tl.float32)
    # add the residual, store the sum
    if HAS_RESIDUAL:
        values += tl.load(residual + row * residual_stride + n, mask=inside, other=0.0).to(tl.float32)
        rounded = (values.to(sums.dtype.element_ty).to(tl.float32) * factor).to(sums.dtype.element_ty)
        tl.store(sums + row * N + n, rounded, mask=inside)
        values = rounded.to(tl.float32)
    # normalise the sum
    if HAS_WEIGHT:
        normed = _normalised(values, weight, n, inside, eps, N)
        tl.store(out + row * N + n, normed.to(out.dtype.element_ty), mask=inside)

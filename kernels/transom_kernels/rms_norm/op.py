"""The operator `rms_norm`: RMS normalisation of rows, or of the sums of rows and the residual.

rms_norm(x, weight) = x / sqrt(mean(x ** 2) + eps) * weight, computed in float32.

Legend: T rows, N row width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from transom_kernels.cpu.arguments import RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.rows import make_inverse_rms
from transom_kernels.cpu.simd import ROUND, float_argument, row_access, splat
from transom_kernels.cpu.work import argument, each_item, helper, row_address
from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    inner: torch.Tensor | None = None,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rms_norm(sum, weight) and the sum, both [T, N] in the dtype of `x`, where the sum is (residual + x) * factor.

    `x` and `residual` are [T, N], `weight` and `inner` [N]. With `inner` the sum is (residual + rms_norm(x, inner)) * factor.
    Without `weight` both results are the sum. Without `residual` the sum is `x` itself, which may then have more dimensions.
    If the weight is float32 and the rows have fewer bits, both are multiplied in float32 and the product is rounded once.

    Raises:
        ValueError: widths do not fit, or `inner`, `factor` or a missing weight come without a residual.
    """
    _check(x, weight, residual, inner, factor)
    if uses_triton(x) and x.stride(-1) == 1 and (residual is None or (x.dim() == 2 and residual.stride(-1) == 1)):
        by_triton: Callable[..., tuple[torch.Tensor, torch.Tensor]] = implementation("rms_norm.gpu", "rms_norm_triton")
        if x.dim() == 2:
            return by_triton(x, weight, eps, residual, inner=inner, factor=factor)
        return by_triton(x.reshape(-1, x.shape[-1]), weight, eps)[0].view_as(x), x
    if uses_cpu_kernels(x) and rows_fit(x, weight, residual, inner):
        return rms_norm_cpu(x, weight, eps, residual, inner=inner, factor=factor)
    if residual is not None:
        x = (residual + (x if inner is None else rms_norm_reference(x, inner, eps))) * factor
    return x if weight is None else rms_norm_reference(x, weight, eps), x


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise over the last dimension in float32 and round once: the specification of `rms_norm` without a residual, in torch."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    inner: torch.Tensor | None,
    factor: float,
) -> None:
    row = x.shape[-1:]
    if (
        (weight is not None and weight.shape != row)
        or (inner is not None and inner.shape != row)
        or (residual is not None and residual.shape != x.shape)
    ):
        shapes = [None if part is None else tuple(part.shape) for part in (weight, inner, residual)]
        raise ValueError(f"x {tuple(x.shape)} does not fit weight, inner and residual {shapes}.")
    if residual is None and (weight is None or inner is not None or factor != 1.0):
        raise ValueError("weight=None, inner and factor apply to sums only: give a residual.")


# --- the CPU kernel and its launch

ITEM_ELEMENTS = 2048  # about as many elements as one work item normalises
_MODULE = "transom_kernels.rms_norm.op"


class RmsNormArguments(NamedTuple):
    """The argument words of the kernel `rms_norm`. The kernel skips a step whose tensor is None."""

    x: RowArguments  # [T, N]
    residual: RowArguments  # [T, N]
    inner: torch.Tensor | None  # [N]
    weight: torch.Tensor | None  # [N]
    out: torch.Tensor  # [T, N], contiguous
    sums: torch.Tensor  # [T, N], contiguous
    num_rows: int  # T
    rows_of_item: int
    width: int  # N
    factor: float
    eps: float


AT = numbers_of(RmsNormArguments)


def rows_fit(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, inner: torch.Tensor | None
) -> bool:
    """Return whether the kernel takes these dtypes and strides."""
    weights = [part for part in (weight, inner) if part is not None]
    rows = [x] if residual is None else [x, residual]
    return (
        len({part.dtype for part in weights}) < 2
        and all(part.dtype in DTYPES and part.stride(-1) == 1 for part in weights)
        and x.dtype in DTYPES
        and all(part.dtype == x.dtype and part.stride(-1) == 1 and _is_matrix(part) for part in rows)
    )


def rms_norm_cpu(
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
    width = x.shape[-1]
    num_rows = x.numel() // width
    sums = x if residual is None else empty(x.shape, x.dtype)
    out = sums if weight is None else empty(x.shape, x.dtype)
    per_item = max(1, ITEM_ELEMENTS // width)  # rows
    like = inner if weight is None else weight
    launch(
        cpu_kernel(
            _MODULE,
            "make_rms_norm",
            dtype=DTYPES[x.dtype],
            weight_dtype=DTYPES[x.dtype if like is None else like.dtype],
        ),
        -(-num_rows // per_item),
        RmsNormArguments(
            x=RowArguments(x, x.stride(-2) * x.element_size()),
            residual=RowArguments.of(residual),
            inner=inner,
            weight=weight,
            out=out,
            sums=sums,
            num_rows=num_rows,
            rows_of_item=per_item,
            width=width,
            factor=factor,
            eps=eps,
        ),
    )
    return out, sums


def _is_matrix(x: torch.Tensor) -> bool:
    """Return whether the rows of a tensor of two or more dimensions are equally far apart in memory, as those of a matrix are."""
    return all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))


def _make_normalise(dtype: str, weight_dtype: str) -> Any:
    """Build normalise(x, weight, out, width, eps), which stores x / rms(x) * weight of one row; weight 0 stands for none."""
    (load, store, size), (load_weight, _, weight_size) = row_access(dtype), row_access(weight_dtype)
    inverse_rms = make_inverse_rms(dtype)

    @helper
    def normalise(x, weight, out, width, eps):
        scale = splat(inverse_rms(x, width, eps))
        for k in range(0, width, 16):
            lanes = load(x + k * size, width - k) * scale
            if weight:
                lanes = lanes * load_weight(weight + k * weight_size, width - k)
            store(out + k * size, lanes, width - k)

    return normalise


def make_rms_norm(dtype: str, weight_dtype: str) -> Any:
    """Build the kernel of `rms_norm_cpu`: y = rms_norm(x, inner); sum = (residual + y) * factor; out = rms_norm(sum, weight).

    A work item is a group of rows. The kernel skips steps whose argument is 0: without `inner` y is x, without `residual` the sum
    is y. Values are rounded wherever separate operators would have written a tensor, so that results equal theirs.
    """
    (load, store, size), (load_weight, _, weight_size) = row_access(dtype), row_access(weight_dtype)
    rounded, inverse_rms, normalise = ROUND[dtype], make_inverse_rms(dtype), _make_normalise(dtype, weight_dtype)

    @helper
    def add(x, residual, inner, sums, width, factor, eps):
        """Store the sum of one row."""
        scale = splat(inverse_rms(x, width, eps)) if inner else splat(1.0)
        for k in range(0, width, 16):
            y = load(x + k * size, width - k)
            if inner:
                y = rounded(y * scale * load_weight(inner + k * weight_size, width - k))
            total = rounded(load(residual + k * size, width - k) + y) * factor
            store(sums + k * size, total, width - k)

    @each_item
    def rms_norm(arguments, thread, item):
        inner, weight = argument(arguments, AT.inner), argument(arguments, AT.weight)
        width, eps = argument(arguments, AT.width), float_argument(arguments, AT.eps)
        factor = splat(float_argument(arguments, AT.factor))
        first = item * argument(arguments, AT.rows_of_item)
        for row in range(first, min(first + argument(arguments, AT.rows_of_item), argument(arguments, AT.num_rows))):
            x = row_address(arguments, AT.x, row)
            if argument(arguments, AT.residual.tensor):
                sums = argument(arguments, AT.sums) + row * width * size
                add(x, row_address(arguments, AT.residual, row), inner, sums, width, factor, eps)
                x = sums
            if weight:
                normalise(x, weight, argument(arguments, AT.out) + row * width * size, width, eps)

    return rms_norm

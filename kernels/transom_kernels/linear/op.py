"""The operators `linear`, `gated_linear` and `embedding_rows` over packed weights.

On CPUs weights are packed in the dtype of the model (`weights.py`), or in 8 or 4 bits (`quantised_linear`); on GPUs only `linear`
has packed weights, quantised ones (`gpu.py`).

A row's result does not depend on other rows, nor on the number of rows or threads. Products are summed in float32; bias, scale,
cap, activation and residual follow in float32, and the result is rounded once.

Legend: M rows, K input width, N output width.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from transom_kernels.cpu.launching import DTYPES
from transom_kernels.gated_mlp import Activation
from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.linear.cpu import embedding_rows_cpu, gated_linear_cpu, heads_linear_cpu, linear_cpu, table_fits
from transom_kernels.linear.gpu import GpuWeight, linear_gpu
from transom_kernels.linear.weights import PackedWeight
from transom_kernels.quantised_linear import PackedPanels
from transom_kernels.quantised_linear.reference import products


def linear(
    x: torch.Tensor,
    weight: PackedWeight | PackedPanels | GpuWeight,
    residual: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `residual + cap(scale * (x @ weight.T + bias))`, [M, N], where cap(y) is `soft_cap * tanh(y / soft_cap)`.

    `x` is [M, K] in the weight's dtype, or in any if the weight is quantised; its rows may lie any stride apart. `residual` is
    [M, N]. The result is in the dtype of `x`, or in float32 if `out_dtype` is float32.

    Raises:
        ValueError: shapes or dtypes do not fit, or a residual is not in the result's dtype.
    """
    _check(x, weight, is_gated=False)
    dtype = out_dtype or x.dtype
    if dtype not in (x.dtype, torch.float32):
        raise ValueError(f"out_dtype is {dtype}; give {x.dtype}, that of x, or torch.float32.")
    wanted = (x.shape[0], weight.num_outputs)
    if residual is not None and (residual.shape != wanted or residual.dtype != dtype):
        raise ValueError(f"The residual is {residual.dtype} {tuple(residual.shape)}; it must be {dtype} {wanted}.")
    if isinstance(weight, GpuWeight):
        is_last = residual is None and scale == 1.0 and soft_cap is None
        product = linear_gpu(x, weight, dtype if is_last else torch.float32)
        return product if is_last else _finished(product, residual, scale, soft_cap, dtype)
    if uses_cpu_kernels(x):
        return linear_cpu(x, weight, residual, scale=scale, soft_cap=soft_cap, out_dtype=dtype)
    if isinstance(weight, PackedPanels):
        (product,) = products(x, weight)
        return _finished(product, residual, scale, soft_cap, dtype)
    (plain,), (bias, _) = weight.unpack(), weight.biases()
    return linear_reference(x, plain, bias, residual, scale=scale, soft_cap=soft_cap, out_dtype=out_dtype)


def heads_linear(x: torch.Tensor, weights: Sequence[PackedWeight]) -> torch.Tensor:
    """Return `x[:, h] @ weights[h].T` for each head h: [T, H, N] of `x` [T, H, K], contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    for head, weight in enumerate(weights):
        _check(x[:, head], weight, is_gated=False)
    if uses_cpu_kernels(x):
        return heads_linear_cpu(x, weights)
    return torch.stack([linear(x[:, head], weight) for head, weight in enumerate(weights)], dim=1)


def gated_linear(x: torch.Tensor, weight: PackedWeight | PackedPanels, activation: Activation) -> torch.Tensor:
    """Return `activation(x @ gate.T + gate bias) * (x @ up.T + up bias)`, [M, N] in the dtype of `x`.

    `x` is as in `linear`.

    Raises:
        ValueError: shapes or dtypes do not fit, or the weight is not gated.
    """
    _check(x, weight, is_gated=True)
    if uses_cpu_kernels(x):
        return gated_linear_cpu(x, weight, activation)
    if isinstance(weight, PackedPanels):
        return _activated(products(x, weight), activation).to(x.dtype)
    gate, up = weight.unpack()
    return gated_linear_reference(x, gate, up, weight.biases(), activation=activation)


def embedding_rows(
    ids: torch.Tensor, table: PackedWeight | torch.Tensor, *, first_id: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """Return the rows `ids - first_id` of a table times `scale`, [M, K] in the table's dtype; zeros for rows that it lacks.

    `ids` are int64 [M]. The table is [N, K], packed or plain.

    Raises:
        ValueError: the ids are not an int64 vector, or the table is not a matrix or is gated.
    """
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise ValueError(f"ids are {ids.dtype} {tuple(ids.shape)}; give a vector of int64.")
    if isinstance(table, PackedWeight):
        if table.is_gated:
            raise ValueError("The table is a gated weight; give one that is not gated.")
    elif table.dim() != 2:
        raise ValueError(f"The table is {tuple(table.shape)}; give a matrix.")
    if uses_cpu_kernels(ids) and table_fits(table):
        return embedding_rows_cpu(ids, table, first_id=first_id, scale=scale)
    plain = table.unpack()[0] if isinstance(table, PackedWeight) else table
    return embedding_rows_reference(ids, plain, first_id=first_id, scale=scale)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `linear` in torch, over plain weights: the specification."""
    return _finished(F.linear(x.float(), weight.float(), bias), residual, scale, soft_cap, out_dtype or x.dtype)


def gated_linear_reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    *,
    activation: Activation,
) -> torch.Tensor:
    """Compute `gated_linear` in torch, over plain weights: the specification."""
    wide = x.float()
    parts = [F.linear(wide, part.float(), bias) for part, bias in zip((gate, up), biases, strict=True)]
    return _activated(parts, activation).to(x.dtype)


def embedding_rows_reference(
    ids: torch.Tensor, table: torch.Tensor, *, first_id: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """Compute `embedding_rows` in torch, over plain weights: the specification."""
    rows = ids - first_id
    absent = (rows < 0) | (rows >= len(table))
    found = table[rows.masked_fill(absent, 0)].float() * scale
    return found.masked_fill(absent[:, None], 0.0).to(table.dtype)


def _finished(
    y: torch.Tensor, residual: torch.Tensor | None, scale: float, soft_cap: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return `residual + cap(scale * y)` of a product in float32."""
    y = y * scale
    if soft_cap is not None:
        y = torch.tanh(y / soft_cap) * soft_cap
    return (y if residual is None else y + residual.float()).to(dtype)


def _activated(parts: Sequence[torch.Tensor], activation: Activation) -> torch.Tensor:
    """Return `activation(gate) * up` of the two products of a gated weight."""
    gate, up = parts
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def _check(x: torch.Tensor, weight: PackedWeight | PackedPanels | GpuWeight, *, is_gated: bool) -> None:
    fits = x.dtype == weight.dtype if isinstance(weight, PackedWeight) else x.dtype in DTYPES
    if x.dim() != 2 or x.shape[1] != weight.width or not fits:
        kind = weight.dtype if isinstance(weight, PackedWeight) else weight.format
        raise ValueError(
            f"x {x.dtype} {tuple(x.shape)} does not fit a {kind} weight [{weight.num_outputs}, {weight.width}]."
        )
    if is_gated != weight.is_gated:
        raise ValueError(
            "The weight is gated; use gated_linear." if weight.is_gated else "The weight is not gated; use linear."
        )

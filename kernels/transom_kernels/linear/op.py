"""The operators `linear`, `gated_linear` and `embedding_rows` over packed weights (`weights.py`), on CPUs.

A row's result does not depend on other rows, nor on the number of rows or threads. Products are summed in float32; bias, scale,
cap, activation and residual follow in float32, and the result is rounded once.

Legend: M rows, K input width, N output width.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.linear.weights import PackedWeight

Activation = Literal["silu", "gelu_tanh"]


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    residual: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `residual + cap(scale * (x @ weight.T + bias))`, [M, N], where cap(y) is `soft_cap * tanh(y / soft_cap)`.

    `x` is [M, K] in the weight's dtype; its rows may lie any stride apart. `residual` is [M, N]. The result is in the dtype of
    `x`, or in float32 if `out_dtype` is float32.

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
    if not uses_cpu_kernels(x):
        (plain,), (bias, _) = weight.unpack(), weight.biases()
        return linear_reference(x, plain, bias, residual, scale=scale, soft_cap=soft_cap, out_dtype=out_dtype)
    from transom_kernels.linear.cpu import linear_cpu

    return linear_cpu(x, weight, residual, scale=scale, soft_cap=soft_cap, out_dtype=dtype)


def gated_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    activation: Activation,
) -> torch.Tensor:
    """Return `activation(x @ gate.T + gate bias) * (x @ up.T + up bias)`, [M, N] in the dtype of `x`.

    `x` is [M, K] in the weight's dtype; its rows may lie any stride apart.

    Raises:
        ValueError: shapes or dtypes do not fit, or the weight is not gated.
    """
    _check(x, weight, is_gated=True)
    if not uses_cpu_kernels(x):
        gate, up = weight.unpack()
        return gated_linear_reference(x, gate, up, weight.biases(), activation=activation)
    from transom_kernels.linear.cpu import gated_linear_cpu

    return gated_linear_cpu(x, weight, activation)


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
            raise ValueError("A gated weight is no table.")
    elif table.dim() != 2:
        raise ValueError(f"The table is {tuple(table.shape)}; give a matrix.")
    from transom_kernels.linear.cpu import embedding_rows_cpu, table_fits

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
    y = F.linear(x.float(), weight.float(), bias) * scale
    if soft_cap is not None:
        y = torch.tanh(y / soft_cap) * soft_cap
    return (y if residual is None else y + residual.float()).to(out_dtype or x.dtype)


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
    gates, ups = F.linear(wide, gate.float(), biases[0]), F.linear(wide, up.float(), biases[1])
    active = F.silu(gates) if activation == "silu" else F.gelu(gates, approximate="tanh")
    return (active * ups).to(x.dtype)


def embedding_rows_reference(
    ids: torch.Tensor, table: torch.Tensor, *, first_id: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """Compute `embedding_rows` in torch, over plain weights: the specification."""
    rows = ids - first_id
    absent = (rows < 0) | (rows >= len(table))
    found = table[rows.masked_fill(absent, 0)].float() * scale
    return found.masked_fill(absent[:, None], 0.0).to(table.dtype)


def _check(x: torch.Tensor, weight: PackedWeight, *, is_gated: bool) -> None:
    if x.dim() != 2 or x.shape[1] != weight.width or x.dtype != weight.dtype:
        raise ValueError(
            f"x {x.dtype} {tuple(x.shape)} does not fit a {weight.dtype} weight [{weight.num_outputs}, {weight.width}]."
        )
    if is_gated != weight.is_gated:
        raise ValueError(f"The weight is {'' if weight.is_gated else 'not '}gated; use the other of the two operators.")

"""Linear layers in float32: the specification of `linear`, `gated_linear` and `embedding_rows`, over plain weights [N, K].

Legend: M rows, K input width, N output width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The contract is that of `op.linear`."""
    y = F.linear(_normed(x, norm).float(), weight.float(), bias) * scale
    if soft_cap is not None:
        y = torch.tanh(y / soft_cap) * soft_cap
    return (y if residual is None else y + residual.float()).to(out_dtype or x.dtype)


def gated_linear_reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    *,
    activation: str,
    limit: float | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """The contract is that of `op.gated_linear`."""
    wide = _normed(x, norm).float()
    gates, ups = F.linear(wide, gate.float(), biases[0]), F.linear(wide, up.float(), biases[1])
    if limit is not None:
        gates, ups = gates.clamp(max=limit), ups.clamp(-limit, limit)
    active = F.silu(gates) if activation == "silu" else F.gelu(gates, approximate="tanh")
    return (active * ups).to(x.dtype)


def embedding_rows_reference(
    ids: torch.Tensor, table: torch.Tensor, *, first_id: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """The contract is that of `op.embedding_rows`."""
    rows = ids - first_id
    absent = (rows < 0) | (rows >= len(table))
    found = table[rows.masked_fill(absent, 0)].float() * scale
    return found.masked_fill(absent[:, None], 0.0).to(table.dtype)


def _normed(x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
    if norm is None:
        return x
    weight, eps = norm
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

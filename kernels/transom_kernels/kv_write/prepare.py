"""`prepare_qkv`: what happens to a token's projections before attention, in one pass: norms, rotation, the write into the cache.

Legend: T tokens, H query heads, KVH heads, D key width, E value width, R rotated width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What a layer does to queries, keys and values; the default is nothing."""

    norm: bool = False  # of each query and key head, before rotation
    q_weight: torch.Tensor | None = None  # [H, D], with `norm`
    k_weight: torch.Tensor | None = None  # [KVH, D], with `norm`
    norm_after_rotation: bool = False  # without a weight
    value_norm: bool = False  # without a weight
    value_factor: float = 1.0
    eps: float = 1e-6
    interleaved: bool = False  # rotary pairs lie side by side
    rotates_last: bool = False  # the last elements of a head are rotated, not the first


PLAIN = Preparation()


def prepare_qkv_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    how: Preparation = PLAIN,
    query_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification, in float32: returns the queries, writes keys and values.

    `q` [T, H, D], `k` [T, KVH, D], `v` [T, KVH, E]; `tables` are cosines and signed sines [T, R] (`rotary`); `query_scale` [T]
    multiplies queries. Without `v` keys alone are written. Token `t` goes to slot `slots[t]` (block * P + offset); below 0 it is
    not written.
    """
    queries = _prepare(q, how.q_weight, tables, how)
    keys = _prepare(k, how.k_weight, tables, how)
    if query_scale is not None:
        queries = queries * query_scale[:, None, None]
    _write(keys, k_cache, slots)
    if v is not None and v_cache is not None:
        values = _normalised(v.float(), how.eps) if how.value_norm else v.float()
        _write(values * how.value_factor, v_cache, slots)
    return queries.to(q.dtype)


def _write(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, cache.shape[1])
            cache[block, offset] = rows[token].to(cache.dtype)


def _prepare(
    x: torch.Tensor, weight: torch.Tensor | None, tables: tuple[torch.Tensor, torch.Tensor] | None, how: Preparation
) -> torch.Tensor:
    x = x.float()
    if how.norm:
        x = _normalised(x, how.eps) * (1.0 if weight is None else weight.float())
    if tables is not None:
        x = _rotated(x, *(table.float()[:, None] for table in tables), how=how)
    return _normalised(x, how.eps) if how.norm_after_rotation else x


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, how: Preparation) -> torch.Tensor:
    width = cos.shape[-1]
    begin = x.shape[-1] - width if how.rotates_last else 0
    before, part, after = x[..., :begin], x[..., begin : begin + width], x[..., begin + width :]
    pairs = part.reshape(*part.shape[:-1], *((width // 2, 2) if how.interleaved else (2, width // 2)))
    swapped = pairs.flip(-1 if how.interleaved else -2).flatten(-2)
    return torch.cat([before, part * cos + swapped * signed_sin, after], dim=-1)

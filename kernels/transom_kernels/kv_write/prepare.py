"""The specification of `prepare_qkv`: what happens to queries, keys and values between the projection and attention.

Order: RMS norm of each head, rotation (RoPE), a second norm without a weight, the Hadamard rotation (`hadamard.py`); queries are
scaled, keys and values written.

Legend: T tokens, H query heads, KVH KV heads, D key width, E value width, R rotated width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.kv_write.hadamard import rotate_heads
from transom_kernels.kv_write.reference import write_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The steps that a layer applies to queries, keys and values before attention; the default is none."""

    norm: bool = False  # RMS norm of each query and key head, before rotation (QK norm)
    q_weight: torch.Tensor | None = None  # [H, D], with `norm`
    k_weight: torch.Tensor | None = None  # [KVH, D], with `norm`
    norm_after_rotation: bool = False  # RMS norm of each query and key head without a weight, after rotation
    value_norm: bool = False  # RMS norm of each value head without a weight
    value_factor: float = 1.0  # multiplies values
    eps: float = 1e-6
    interleaved: bool = False  # rotary pairs are (2i, 2i + 1), not (i, i + R / 2)
    rotates_last: bool = False  # the last elements of a head are rotated, not the first
    hadamard: bool = False  # query and key heads are multiplied by the Hadamard matrix, last


PLAIN = Preparation()


def prepare_qkv_reference(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    preparation: Preparation = PLAIN,
    query_scale: torch.Tensor | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """The specification, in float32: returns the queries, writes keys and values.

    `q` [T, H, D], `k` [T, KVH, D], `v` [T, KVH, E]; `tables` are cosines and signed sines [T, R] (`rotary`); `query_scale` [T]
    multiplies queries. Without `v` only keys are written, without `k` nothing is. Token `t` goes to slot `slots[t]` (block * P +
    offset); a token whose slot is below 0 is not written. With `kv_scales` [ids, P, KVH] each the caches are quantised.
    """
    queries = _prepare(q, preparation.q_weight, tables, preparation)
    if query_scale is not None:
        queries = queries * query_scale[:, None, None]
    k_scale, v_scale = kv_scales or (None, None)
    if k is not None and k_cache is not None:
        write_rows(_prepare(k, preparation.k_weight, tables, preparation), k_cache, slots, k_scale)
    if v is not None and v_cache is not None:
        values = _normalised(v.float(), preparation.eps) if preparation.value_norm else v.float()
        write_rows(values * preparation.value_factor, v_cache, slots, v_scale)
    return queries.to(q.dtype)


def _prepare(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    preparation: Preparation,
) -> torch.Tensor:
    """Heads [T, heads, width] in float32 after norm, rotation, norm after rotation and Hadamard rotation."""
    x = x.float()
    if preparation.norm:
        x = _normalised(x, preparation.eps) * (1.0 if weight is None else weight.float())
    if tables is not None:
        x = _rotated(x, *(table.float()[:, None] for table in tables), preparation=preparation)
    x = _normalised(x, preparation.eps) if preparation.norm_after_rotation else x
    return rotate_heads(x) if preparation.hadamard else x


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) over the last axis."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, preparation: Preparation) -> torch.Tensor:
    """The first (or last) R elements of each head rotated by pairs."""
    width = cos.shape[-1]
    begin = x.shape[-1] - width if preparation.rotates_last else 0
    before, part, after = x[..., :begin], x[..., begin : begin + width], x[..., begin + width :]
    pairs = part.reshape(*part.shape[:-1], *((width // 2, 2) if preparation.interleaved else (2, width // 2)))
    swapped = pairs.flip(-1 if preparation.interleaved else -2).flatten(-2)
    return torch.cat([before, part * cos + swapped * signed_sin, after], dim=-1)

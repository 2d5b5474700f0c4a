"""`kv_write`: scatter the keys and values of T tokens into their slots.

Legend: T tokens, P block size, KVH heads, D key width, Dv value width.
"""

from __future__ import annotations

from typing import Any

import torch

from transom_kernels.kv_write.fused import fused_target


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    scratch: dict[str, Any] | None = None,
) -> None:
    """Write `k` [T, KVH, D] and `v` [T, KVH, Dv] to `k_cache` and `v_cache` [ids, P, KVH, width], in place.

    Token `t` goes to block `slots[t] // P`, offset `slots[t] % P`; masked tokens carry slots of the dump block, which may
    repeat. Caches may have any strides. `scratch` keeps indices for further calls with the same slots (other layers).

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(k, v, k_cache, v_cache, slots)
    scratch = {} if scratch is None else scratch
    fused = fused_target(k, v, k_cache, v_cache, slots, scratch)
    if fused is not None:
        rows, index, source = fused
        rows.index_put_((index,), source)
        return
    blocks, offsets = _block_offsets(slots, k_cache.shape[1], scratch)
    k_cache.index_put_((blocks, offsets), k)
    v_cache.index_put_((blocks, offsets), v)


def _block_offsets(slots: torch.Tensor, block_size: int, scratch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    if "kv_write.split" not in scratch:
        scratch["kv_write.split"] = (slots // block_size, slots % block_size)
    pair: tuple[torch.Tensor, torch.Tensor] = scratch["kv_write.split"]
    return pair


def _check(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    if k.shape[1:] != k_cache.shape[2:] or v.shape[1:] != v_cache.shape[2:]:
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)} do not fit caches {tuple(k_cache.shape)}, {tuple(v_cache.shape)}: "
            "heads and widths must agree."
        )
    if k.dtype != k_cache.dtype or v.dtype != v_cache.dtype:
        raise ValueError(f"k is {k.dtype}, its cache {k_cache.dtype}; v is {v.dtype}, its cache {v_cache.dtype}.")
    if not k.shape[0] == v.shape[0] == slots.shape[0]:
        raise ValueError(f"{k.shape[0]} keys, {v.shape[0]} values and {slots.shape[0]} slots: give one each per token.")

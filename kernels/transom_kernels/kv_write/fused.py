"""The CPU's fast path of `kv_write`: K and V in one scatter, if both are adjacent in the source and lie in one storage in the
cache.

Every (token, head) of K and of V is one row of `width` elements somewhere in the cache's storage, so one index addresses them all.
Row numbers are relative to the layer's K, hence equal for all layers whose strides agree.

Legend: T tokens, KVH KV heads, D width, N rows of the storage.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_Rows = tuple[int, int, torch.Tensor]


def fused_target(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    scratch: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The storage as rows [N, D], the index [T, 2 KVH] and the source [T, 2 KVH, D]; None if one scatter cannot do it."""
    strides = k_cache.stride()
    delta = int(v_cache.storage_offset()) - int(k_cache.storage_offset())
    heads, width = k.shape[1], k.shape[2]
    if (
        delta <= 0
        or strides[3] != 1
        or v_cache.stride() != strides
        or k.stride() != v.stride()
        or k.stride(1) != width
        or k.shape != v.shape
        or v.storage_offset() - k.storage_offset() != heads * width
        or k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()
        or k_cache.untyped_storage().data_ptr() != v_cache.untyped_storage().data_ptr()
    ):
        return None
    indices: dict[tuple[object, ...], _Rows] = scratch.setdefault("kv_write", {})
    key = (strides, delta, heads)
    if key not in indices:
        indices[key] = _row_index(slots, k_cache.shape, strides, delta)
    unit, num_rows, index = indices[key]
    rows = k_cache.as_strided((num_rows, width), (unit, 1))
    return rows, index, k.as_strided((k.shape[0], 2 * heads, width), k.stride())


def _row_index(slots: torch.Tensor, shape: torch.Size, strides: tuple[int, ...], delta: int) -> _Rows:
    """The row unit in elements, the number of rows, and the rows [T, 2 KVH] of each token."""
    ids, block_size, heads, _ = shape
    unit = math.gcd(*strides[:3], delta)
    block, token, head, values = (s // unit for s in (*strides[:3], delta))
    heads_index = torch.arange(heads, device=slots.device) * head
    places = torch.cat([heads_index, heads_index + values])
    index = (slots // block_size * block + slots % block_size * token)[:, None] + places
    num_rows = (ids - 1) * block + (block_size - 1) * token + (heads - 1) * head + values + 1
    return unit, num_rows, index

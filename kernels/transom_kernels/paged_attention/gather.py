"""Gathers a tile's blocks of keys and values out of the paged cache into dense tensors, with one `index_select` for both.

For one KV head a block is P rows of D elements. The cache's storage is viewed as overlapping *items*: item `i` begins at element
`i * unit`, where `unit` divides the strides of blocks and heads and the distance from K to V. So every (block, head) of K and of V
is one item, and one index fetches both. Item numbers are relative to the layer's K, so all layers with equal strides share an
index. The gather is fastest where the P rows of a head are adjacent (a block is laid out [head, token, dim]).

Legend: n sequences, KVH KV heads, N blocks of each sequence, P block size, L = N * P keys, D width, Z keys to zero.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

import torch

from transom_kernels.quantised_kv import dequantise_rows


@dataclass(slots=True, kw_only=True)
class BlockSet:
    """The blocks that a tile reads, and which of their keys no row sees and must be zero (their slots may hold NaN)."""

    blocks: torch.Tensor  # [n, N] physical block ids
    zeroed_keys: torch.Tensor | None  # [Z] as `sequence * L + key in the tile`
    index_cache: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor | None]] = field(
        default_factory=dict
    )  # by strides


@dataclass(frozen=True, slots=True)
class TileKv:
    """A layer's caches of keys and values, and what their gathered rows become."""

    k_cache: torch.Tensor  # [ids, P, KVH, elements]
    v_cache: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None  # [ids, P, KVH] each, of quantised caches
    dtype: torch.dtype  # of the gathered rows


def gather_kv(kv: TileKv, block_set: BlockSet) -> tuple[torch.Tensor, torch.Tensor]:
    """K [n * KVH, L, D] and V [n * KVH, L, Dv] of the tile, zeroed where no row sees a key; valid until this thread's next gather.

    A sequence's K and V are adjacent in the result, so the CPU core that gathers a sequence has both in its cache when it attends.
    """
    k_cache, v_cache = kv.k_cache, kv.v_cache
    if kv.scales is not None:
        k, v = (
            _gather_quantised(cache, scale, block_set, kv.dtype)
            for cache, scale in zip((k_cache, v_cache), kv.scales, strict=True)
        )
        return k, v
    delta = int(v_cache.storage_offset()) - int(k_cache.storage_offset())
    if _lie_at_fixed_distance(k_cache, v_cache, delta):
        both = _gather(k_cache, block_set, delta, buffer_id=0)
        return both[:, 0], both[:, 1]
    return _gather(k_cache, block_set, 0, buffer_id=0)[:, 0], _gather(v_cache, block_set, 0, buffer_id=1)[:, 0]


def _lie_at_fixed_distance(k_cache: torch.Tensor, v_cache: torch.Tensor, delta: int) -> bool:
    """Whether each row of V lies `delta` elements behind its row of K in one storage."""
    return (
        delta > 0
        and k_cache.stride() == v_cache.stride()
        and k_cache.shape == v_cache.shape
        and k_cache.untyped_storage().data_ptr() == v_cache.untyped_storage().data_ptr()
    )


def _gather(cache: torch.Tensor, block_set: BlockSet, delta: int, *, buffer_id: int) -> torch.Tensor:
    """[n * KVH, 2, L, D] of K and the tensor `delta` elements behind it, or [n * KVH, 1, L, D] of one tensor (`delta` 0)."""
    ids, size, heads, width = cache.shape
    block, token, head, inner = cache.stride()
    unit = math.gcd(block, head, delta)
    key = (block, head, delta, heads, size)
    if key not in block_set.index_cache:
        block_set.index_cache[key] = _index(block_set, unit, block, head, delta, heads, size)
    index, zeroed_keys = block_set.index_cache[key]
    num_items = ((ids - 1) * block + (heads - 1) * head + delta) // unit + 1
    items = cache.as_strided((num_items, size, width), (unit, token, inner))
    if token == width and inner == 1:
        items = cache.as_strided((num_items, size * width), (unit, 1))
    out = _workspace(buffer_id, cache, index.shape[0] * size * width).view(index.shape[0], *items.shape[1:])
    torch.index_select(items, 0, index, out=out)
    if zeroed_keys is not None:
        out.view(-1, width).index_fill_(0, zeroed_keys, 0.0)
    return out.view(block_set.blocks.shape[0] * heads, 2 if delta else 1, block_set.blocks.shape[1] * size, width)


def _gather_quantised(
    cache: torch.Tensor, scale: torch.Tensor, block_set: BlockSet, dtype: torch.dtype
) -> torch.Tensor:
    """[n * KVH, L, D] of a quantised cache."""
    blocks = block_set.blocks
    elements = cache.view(torch.uint8)[blocks].view(cache.dtype)  # [n, N, P, KVH, elements]
    rows = dequantise_rows(elements, scale[blocks]).to(dtype)
    n, _, _, heads, width = rows.shape
    gathered = rows.permute(0, 3, 1, 2, 4).reshape(n, heads, -1, width)
    if block_set.zeroed_keys is not None:
        length = gathered.shape[2]
        gathered[block_set.zeroed_keys // length, :, block_set.zeroed_keys % length] = 0.0
    return gathered.flatten(0, 1)


def _index(
    block_set: BlockSet, unit: int, block: int, head: int, delta: int, heads: int, size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Item numbers in the order [sequence, head, K then V, block], and the rows of the result that are set to zero."""
    num_blocks = block_set.blocks.shape[1]
    device = block_set.blocks.device
    parts = torch.arange(2 if delta else 1, device=device)
    head_items = torch.arange(heads, device=device) * (head // unit)
    index = block_set.blocks[:, None, None, :] * (block // unit) + head_items[:, None, None]
    index = index + (parts * (delta // unit))[:, None]
    if block_set.zeroed_keys is None:
        return index.reshape(-1), None
    length = num_blocks * size
    sequence, place = block_set.zeroed_keys // length, block_set.zeroed_keys % length
    matrix = (sequence * heads + torch.arange(heads, device=device)[:, None]) * len(parts) + parts[:, None, None]
    return index.reshape(-1), (matrix * length + place).reshape(-1)


_buffers = threading.local()


def _workspace(buffer_id: int, like: torch.Tensor, numel: int) -> torch.Tensor:
    """A buffer that the thread reuses: a new one for every layer would cost page faults, which take longer than the copy."""
    key = (buffer_id, like.dtype, like.device)
    held: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = _buffers.__dict__.setdefault("held", {})
    if key not in held or held[key].numel() < numel:
        with torch.inference_mode(False):
            held[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
    return held[key][:numel]

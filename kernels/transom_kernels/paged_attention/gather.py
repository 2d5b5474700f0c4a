"""Reading blocks out of the cache into dense K and V, with one `index_select`.

For one KV head a block is P rows of D elements. Seen through a view of the storage in which item `i` starts at element
`i * unit`, every (block, head) of K *and* of V is one item, so one index fetches both. Item numbers are relative to the layer's
K, hence shared by all layers whose strides agree. Fastest where a head's P rows lie together ([head, token, dim] in a block).

Legend: n sequences, KVH heads, N blocks each, P block size, L = N * P, D width.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

import torch


@dataclass(slots=True, kw_only=True)
class BlockSet:
    """Blocks [n, N] to read, keys to blank [Z] as flat numbers `sequence * L + position in tile`, and indices made so far."""

    blocks: torch.Tensor
    blank: torch.Tensor | None
    made: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)


def gather_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, wanted: BlockSet) -> tuple[torch.Tensor, torch.Tensor]:
    """K [n * KVH, L, D] and V [n * KVH, L, Dv], blanked keys zero. Valid until the next gather on this thread.

    A sequence's K and V come out next to each other, so that the core that gathers a sequence has both in its cache when it
    attends to them.
    """
    delta = int(v_cache.storage_offset()) - int(k_cache.storage_offset())
    if _share_storage(k_cache, v_cache, delta):
        both = _gather(k_cache, wanted, delta, slot=0)
        return both[:, 0], both[:, 1]
    return _gather(k_cache, wanted, 0, slot=0)[:, 0], _gather(v_cache, wanted, 0, slot=1)[:, 0]


def _share_storage(k_cache: torch.Tensor, v_cache: torch.Tensor, delta: int) -> bool:
    return (
        delta > 0
        and k_cache.stride() == v_cache.stride()
        and k_cache.shape == v_cache.shape
        and k_cache.untyped_storage().data_ptr() == v_cache.untyped_storage().data_ptr()
    )


def _gather(cache: torch.Tensor, wanted: BlockSet, delta: int, *, slot: int) -> torch.Tensor:
    ids, size, heads, width = cache.shape
    block, token, head, inner = cache.stride()
    unit = math.gcd(block, head, delta)
    key = (block, head, delta, heads, size)
    if key not in wanted.made:
        wanted.made[key] = _index(wanted, unit, block, head, delta, heads, size)
    index, blank = wanted.made[key]
    num_items = ((ids - 1) * block + (heads - 1) * head + delta) // unit + 1
    items = cache.as_strided((num_items, size, width), (unit, token, inner))
    if token == width and inner == 1:
        items = cache.as_strided((num_items, size * width), (unit, 1))
    out = _workspace(slot, cache, index.shape[0] * size * width).view(index.shape[0], *items.shape[1:])
    torch.index_select(items, 0, index, out=out)
    if blank is not None:
        out.view(-1, width).index_fill_(0, blank, 0.0)
    return out.view(wanted.blocks.shape[0] * heads, 2 if delta else 1, wanted.blocks.shape[1] * size, width)


def _index(
    wanted: BlockSet, unit: int, block: int, head: int, delta: int, heads: int, size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Items in the order [sequence, head, K then V, block], and the blanked keys' rows in the result."""
    num_blocks = wanted.blocks.shape[1]
    device = wanted.blocks.device
    parts = torch.arange(2 if delta else 1, device=device)
    head_items = torch.arange(heads, device=device) * (head // unit)
    index = wanted.blocks[:, None, None, :] * (block // unit) + head_items[:, None, None]
    index = index + (parts * (delta // unit))[:, None]
    if wanted.blank is None:
        return index.reshape(-1), None
    length = num_blocks * size
    sequence, place = wanted.blank // length, wanted.blank % length
    matrix = (sequence * heads + torch.arange(heads, device=device)[:, None]) * len(parts) + parts[:, None, None]
    return index.reshape(-1), (matrix * length + place).reshape(-1)


_buffers = threading.local()


def _workspace(slot: int, like: torch.Tensor, numel: int) -> torch.Tensor:
    """A reused buffer: fresh megabytes for every layer would be page faults, which cost more than the copy."""
    key = (slot, like.dtype, like.device)
    held: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = _buffers.__dict__.setdefault("held", {})
    if key not in held or held[key].numel() < numel:
        with torch.inference_mode(False):
            held[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
    return held[key][:numel]

"""Allocates the slab, the one piece of memory that holds a rank's KV pool, and makes the views of it that are the layers' caches.

- group: layers whose caches share block tables; a block id names one block in each of the group's layers.
- dump block: the last block of a group, which no sequence owns; tokens that need not be stored are written there.
- role: what a tensor of a layer holds: keys and values, or what a compressed layer keeps besides (see `CompressedCache`).

Legend: N block ids of a group (the dump block included), P rows per block, H KV heads, D head size.
"""

from __future__ import annotations

import torch

from transom_core.errors import ConfigError
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout, LayerTensors, Role
from transom_kernels.cpu.memory import lazy_bytes
from transom_worker.models.layers.forward_batch import CachePart, CompressedCache, LayerCache

Parts = dict[tuple[int, Role], CachePart]  # by layer and role


def allocate_slab(layout: ArenaLayout, device: torch.device) -> torch.Tensor:
    """Allocate zeroed bytes for all pages and dump blocks.

    The zeros matter: masked keys still take part in matrix products, where garbage could be NaN. On CPUs the operating system
    provides zeroed pages on first touch, so that a large pool costs nothing until it is used.

    Raises:
        ConfigError: the memory is too small.
    """
    try:
        if device.type == "cpu":
            return lazy_bytes(layout.slab_bytes)  # in huge pages, which made decoding 32 sequences 1.26 times as fast
        return torch.zeros(layout.slab_bytes, dtype=torch.uint8, device=device)
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"A KV pool of {layout.pool_bytes} bytes cannot be allocated on {device} ({error}); give a smaller "
            "--kv-cache-memory-bytes."
        ) from error


def layer_caches(layout: ArenaLayout, slab: torch.Tensor) -> tuple[LayerCache, ...]:
    """Return views of every layer's K and V, by layer."""
    parts = _parts(layout, slab)
    return tuple(parts[layer, Role.KV].cache for layer in _layers(layout))


def group_of_layer(layout: ArenaLayout) -> tuple[int, ...]:
    """Return the index of the group that holds a layer's K and V, by layer."""
    groups = {
        tensors.layer: index
        for index, group in enumerate(layout.groups)
        for tensors in group.layers
        if tensors.role is Role.KV
    }
    return tuple(groups[layer] for layer in _layers(layout))


def compressed_caches(layout: ArenaLayout, slab: torch.Tensor) -> tuple[CompressedCache | None, ...]:
    """Return what compressed layers keep besides K and V, by layer; empty if no layer is compressed."""
    parts = _parts(layout, slab)
    caches = tuple(_compressed_cache(parts, layer) for layer in _layers(layout))
    return caches if any(caches) else ()


def _layers(layout: ArenaLayout) -> list[int]:
    return sorted({tensors.layer for group in layout.groups for tensors in group.layers})


def _parts(layout: ArenaLayout, slab: torch.Tensor) -> Parts:
    return {
        (tensors.layer, tensors.role): CachePart(_layer_cache(slab, group, tensors, layout.num_block_ids(index)), index)
        for index, group in enumerate(layout.groups)
        for tensors in group.layers
    }


def _compressed_cache(parts: Parts, layer: int) -> CompressedCache | None:
    if (layer, Role.COMPRESSED) not in parts:
        return None
    index = None
    if (layer, Role.INDEXER) in parts:
        index = CompressedCache(entries=parts[layer, Role.INDEXER], state=parts[layer, Role.INDEXER_STATE])
    return CompressedCache(entries=parts[layer, Role.COMPRESSED], state=parts[layer, Role.STATE], index=index)


def block_rows(layout: ArenaLayout, slab: torch.Tensor, group: int) -> torch.Tensor:
    """Return a group's blocks as rows of bytes, [N, stride]."""
    stride = layout.groups[group].stride_bytes
    num_ids = layout.num_block_ids(group)
    return slab[: num_ids * stride].view(num_ids, stride)


def _layer_cache(slab: torch.Tensor, group: GroupLayout, layer: LayerTensors, num_ids: int) -> LayerCache:
    dtype: torch.dtype = getattr(torch, layer.dtype)

    def view(offset: int, size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return _view(slab, group, layer.num_kv_heads, num_ids, dtype, offset=offset, size=size)

    k = view(layer.k_offset, layer.k_size)
    v = k if layer.v_offset == layer.k_offset else view(layer.v_offset, layer.v_size)
    if layer.k_scale_offset is None or layer.v_scale_offset is None:
        return LayerCache(k, v)
    k_scale, v_scale = (
        view(offset, 1, torch.float32)[..., 0] for offset in (layer.k_scale_offset, layer.v_scale_offset)
    )
    return LayerCache(k, v, k_scale, v_scale, hadamard=layer.hadamard)


def _view(
    slab: torch.Tensor, group: GroupLayout, heads: int, num_ids: int, dtype: torch.dtype, *, offset: int, size: int
) -> torch.Tensor:
    """Return one cache tensor of a layer as [N, P, H, D], with a stride of one block between blocks.

    Inside a block, the tokens of one head are contiguous, because attention gathers (block, head) pieces. On a CPU with 32
    sequences this decodes 1.4 to 1.6 times as fast as a layout in which the heads of one token are contiguous.
    """
    rows = group.rows_per_block
    return slab.view(dtype).as_strided(
        (num_ids, rows, heads, size),
        (group.stride_bytes // dtype.itemsize, size, rows * size, 1),
        offset // dtype.itemsize,
    )

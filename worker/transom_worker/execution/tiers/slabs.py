"""Allocates the slab of a rank's KV pool and that of its host tier, each one tensor of bytes, and makes the views of the pool that
are the layers' caches.

The host's slab has the same groups, blocks and pages as the device's, but a different number of pages.

- group: layers whose caches share block tables; a block id names one block in each of the group's layers.
- dump block: the last block of a group, which no sequence owns; tokens that need not be stored are written there.
- role: what a tensor of a layer holds: keys and values, or what a compressed layer keeps besides (see `CompressedCache`).

Legend: N block ids of a group (the dump block included), P rows per block, H KV heads, D head size.
"""

import weakref
from typing import NamedTuple

import torch

from transom_core.errors import ConfigError
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout, LayerTensors, Role
from transom_kernels.cpu.memory import lazy_bytes
from transom_worker.models.layers.forward_batch import CachePart, CompressedCache, LayerCache


class TierMemory(NamedTuple):
    """One tier's memory on this rank."""

    layout: ArenaLayout
    slab: torch.Tensor

    def rows(self, group: int) -> torch.Tensor:
        """Return a group's blocks as rows of bytes, [block ids, stride]."""
        return block_rows(self.layout, self.slab, group)


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


def allocate_host_slab(
    layout: ArenaLayout, device: torch.device, *, available_bytes: int, pool_bytes: int = 0, ranks_on_host: int = 1
) -> torch.Tensor:
    """Allocate zeroed bytes for all pages of the host tier of a rank that computes on `device`.

    For a GPU they are pinned, so that copies run beside steps. For a CPU they take memory only as their pages are first touched.
    `available_bytes` is the host's free memory, which `ranks_on_host` ranks share. `pool_bytes` is what
    each rank's KV pool will still take of it: 0 unless the pool is in the host's memory and not touched yet.

    Raises:
        ConfigError: the host's memory is too small.
    """
    needed = ranks_on_host * (layout.slab_bytes + pool_bytes)
    if needed > available_bytes:
        most = max(0, available_bytes // ranks_on_host - pool_bytes)
        pool = f" and KV pools of {pool_bytes} bytes" if pool_bytes else ""
        raise ConfigError(
            f"--swap-space asks for a host tier of {layout.slab_bytes} bytes; with {ranks_on_host} ranks on this host, host tiers"
            f"{pool} take {needed} bytes, and {available_bytes} are free. Give at most {most / 2**30:.2f}GiB."
        )
    try:
        if device.type == "cuda":
            return pinned_bytes(layout.slab_bytes)
        return lazy_bytes(layout.slab_bytes)
    except (OSError, MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"A host tier of {layout.slab_bytes} bytes cannot be allocated ({error}); {available_bytes} bytes are free. Give a "
            "smaller --swap-space."
        ) from error


def pinned_bytes(num_bytes: int) -> torch.Tensor:
    """Return exactly `num_bytes` zeroed bytes that CUDA has pinned; they are unpinned once the tensor is gone.

    torch's own pinned memory is not used: its allocator rounds up to a power of two, so that a tier of 40 GiB would take 64 GiB,
    and one thread would fill it with zeros. The system's memory is zero already, and CUDA pins it as it is (`cudaHostRegister`).

    Raises:
        RuntimeError: CUDA cannot pin them.
    """
    slab = lazy_bytes(num_bytes)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
    # The storage lives until the callback has run: CUDA must forget the pages before the system takes them back.
    end = weakref.finalize(slab, lambda storage: cudart.cudaHostUnregister(storage.data_ptr()), slab.untyped_storage())
    end.atexit = False  # a process that ends gives all its memory back
    return slab


def layer_caches(layout: ArenaLayout, slab: torch.Tensor) -> tuple[LayerCache, ...]:
    """Return views of every layer's K and V, by layer; of recurrent layers the states and the convolution's rows."""
    parts = _parts(layout, slab)
    return tuple(_own_cache(layout, slab, parts, layer) for layer in _layers(layout))


def _own_cache(layout: ArenaLayout, slab: torch.Tensor, parts: Parts, layer: int) -> LayerCache:
    if (layer, Role.RECURRENT) not in parts:
        return parts[layer, Role.KV].cache
    state = parts[layer, Role.RECURRENT]
    group = layout.groups[state.group]
    convolved = (Role.CONVOLVED_KEYS, Role.CONVOLVED_VALUES)
    rows = [one for one in group.layers if one.layer == layer and one.role in convolved]
    has_keys = rows[0].role is Role.CONVOLVED_KEYS  # Mamba-1's are values alone
    of_token = rows[: 1 + has_keys]
    channels = sum(one.num_kv_heads * one.k_size for one in (*of_token, *rows[:has_keys]))
    dtype: torch.dtype = getattr(torch, rows[0].dtype)
    rows_NRC = slab.view(dtype).as_strided(
        (layout.num_block_ids(state.group), len(rows) // len(of_token), channels),
        (group.stride_bytes // dtype.itemsize, channels, 1),
        rows[0].k_offset // dtype.itemsize,
    )
    return LayerCache(state.cache.k, rows_NRC)


def group_of_layer(layout: ArenaLayout) -> tuple[int, ...]:
    """Return the index of the group that holds a layer's K and V, by layer."""
    groups = {
        tensors.layer: index
        for index, group in enumerate(layout.groups)
        for tensors in group.layers
        if tensors.role in (Role.KV, Role.RECURRENT)
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

"""From a model's attention layers to KV cache groups and the byte arena's layout. Integers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transom_worker.errors import ConfigError
from transom_worker.kvcache.groups import GroupKind, GroupSpec
from transom_worker.kvcache.layout import BLOCK_ALIGNMENT_BYTES, ArenaLayout, GroupLayout, LayerTensors
from transom_worker.models.architecture import Architecture, LayerAttention

MAX_PAGE_BYTES = 2 * 2**20
WANTED_PAGES = 1000
WANTED_BLOCKS_PER_PAGE = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_EVERYTHING = (0, 0, 0)  # no window, sinks or chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class PageChoice:
    """A page size, and the share of the pool lost at page edges (worst group) and behind the last page."""

    page_bytes: int
    waste: float


def make_groups(architecture: Architecture, *, block_size: int, hybrid: bool) -> tuple[GroupSpec, ...]:
    """Groups of layers that keep the same tokens: full first, then windows and chunks as they appear.

    Without `hybrid` every layer keeps its full length in one group; what its attention reads does not change.
    """
    members: dict[tuple[int, int, int], list[int]] = {}
    for index, layer in enumerate(architecture.layers):
        members.setdefault(_retention(layer) if hybrid else _EVERYTHING, []).append(index)
    ordered = sorted(members.items(), key=lambda item: (item[0] != _EVERYTHING, item[1][0]))
    return tuple(_group(*retention, tuple(layers), block_size) for retention, layers in ordered)


def group_of_layer(groups: Sequence[GroupSpec]) -> tuple[int, ...]:
    """The group index of each layer."""
    pairs = sorted((layer, index) for index, group in enumerate(groups) for layer in group.layers)
    return tuple(index for _, index in pairs)


def group_layout(spec: GroupSpec, architecture: Architecture, dtype: str) -> GroupLayout:
    """One group's block: K then V of each layer in turn, rounded up to the alignment."""
    offset = 0
    layers = []
    for index in spec.layers:
        layer = architecture.layers[index]
        part_bytes = spec.block_size * layer.num_kv_heads * layer.head_size * DTYPE_BYTES[dtype]
        layers.append(
            LayerTensors(
                layer=index,
                num_kv_heads=layer.num_kv_heads,
                k_size=layer.head_size,
                v_size=layer.head_size,
                dtype=dtype,
                k_offset=offset,
                v_offset=offset + part_bytes,
            )
        )
        offset += 2 * part_bytes
    stride = -(-offset // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES
    return GroupLayout(spec=spec, block_bytes=offset, stride_bytes=stride, layers=tuple(layers))


def make_layout(groups: tuple[GroupLayout, ...], pool_bytes: int) -> ArenaLayout:
    """The arena of at most `pool_bytes`, with the page size that wastes least.

    Raises:
        ConfigError: not even one block of each group fits.
    """
    choice = choose_page_bytes([group.stride_bytes for group in groups], pool_bytes)
    return ArenaLayout(page_bytes=choice.page_bytes, num_pages=pool_bytes // choice.page_bytes, groups=groups)


def choose_page_bytes(strides: Sequence[int], pool_bytes: int) -> PageChoice:
    """The page size for block strides: pages of about 2 MiB at most, 1,000 of them where the pool allows, several blocks of
    each group in every page; among those the least waste, then the largest page.

    Raises:
        ConfigError: not even one page per group fits.
    """
    largest = max(strides)
    limit = max(min(MAX_PAGE_BYTES, pool_bytes // WANTED_PAGES), WANTED_BLOCKS_PER_PAGE * largest)
    limit = max(min(limit, pool_bytes // (4 * len(strides))), largest)
    candidates = {multiple for stride in strides for multiple in range(stride, limit + 1, stride)}
    common = math.lcm(*strides)
    candidates.update(range(common, limit + 1, common))
    fitting = [
        page
        for page in candidates
        if page * len(strides) <= pool_bytes and all(least_blocks(page, stride) >= 1 for stride in strides)
    ]
    if not fitting:
        raise ConfigError(
            f"The KV pool of {pool_bytes} bytes cannot hold one block of each of {len(strides)} cache group(s), which "
            f"take {', '.join(map(str, strides))} bytes; give --kv-cache-memory-bytes at least {2 * len(strides) * largest}."
        )
    waste = {page: _waste(page, strides, pool_bytes) for page in fitting}
    best = min(fitting, key=lambda page: (round(waste[page], 3), -page))
    return PageChoice(page_bytes=best, waste=waste[best])


def least_blocks(page_bytes: int, stride: int) -> int:
    """Blocks that even the worst-placed page holds wholly."""
    return (page_bytes - stride + math.gcd(page_bytes, stride)) // stride


def geometry_waste(layout: ArenaLayout) -> float:
    """The share of the arena's pages that the worst group cannot use when it leases them all."""
    return max(_edge_waste(layout.page_bytes, group.stride_bytes) for group in layout.groups)


def _waste(page_bytes: int, strides: Sequence[int], pool_bytes: int) -> float:
    return max(_edge_waste(page_bytes, stride) for stride in strides) + pool_bytes % page_bytes / pool_bytes


def _edge_waste(page_bytes: int, stride: int) -> float:
    """Mean over all placements, which are multiples of the common divisor."""
    return 1.0 - (page_bytes - stride + math.gcd(page_bytes, stride)) / page_bytes


def _retention(layer: LayerAttention) -> tuple[int, int, int]:
    """(window, sinks, chunk), zeros for everything."""
    return layer.window or 0, layer.sinks, layer.chunk or 0


def _group(window: int, sinks: int, chunk: int, layers: tuple[int, ...], block_size: int) -> GroupSpec:
    if chunk:
        kind, name = GroupKind.CHUNK, f"chunk_{chunk}"
    elif not window:
        kind, name = GroupKind.FULL, "full"
    elif not sinks:
        kind, name = GroupKind.WINDOW, f"window_{window}"
    else:
        kind, name = GroupKind.SINKS_WINDOW, f"sinks_{sinks}_window_{window}"
    return GroupSpec(
        name=name, kind=kind, layers=layers, block_size=block_size, window=window, sinks=sinks, chunk=chunk
    )

"""Cuts and joins KV blocks by heads, for two workers that divide the KV heads among different numbers of ranks.

A *block* has the keys and values of some tokens in all layers of a KV cache group. Each tensor-parallel rank keeps the part for its
own KV heads. Latent rows (of MLA), and heads if there are more ranks than heads, are kept as equal copies by several ranks. Example
with 3 KV heads:

    source, 2 ranks      rank 0: heads 0 1      rank 1: head 2
    target, 3 ranks      rank 0: head 0         rank 1: head 1        rank 2: head 2
    target, 5 ranks      0: head 0     1: head 1     2: head 1     3: head 2     4: head 2

For each layer and each *part* (keys, values), `_join` collects all heads from the source's ranks, and `_cut` gives each of the
target's ranks its own. Numbers are not converted: both workers have the same identity, which includes the number formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from transom_core.kv_cache.kv_shares import KvShares
from transom_core.kv_cache.layout import DTYPE_BYTES, GroupLayout, LayerTensors

Bytes = NDArray[np.uint8]
Data = bytes | bytearray | memoryview | Bytes


class _Rows(NamedTuple):
    """Keys or values of all KV heads of a layer, as bytes: `data` [blocks, heads, rows, bytes of a row] and, if the format has
    scales (one float32 per row), `scales` [blocks, heads, rows, 4]."""

    data: Bytes
    scales: Bytes | None


class Part(NamedTuple):
    """Where the keys or the values of one layer lie in a block, as byte offsets."""

    tensors: LayerTensors
    offset: int
    scale_offset: int | None
    size: int  # elements of a row


def convert_blocks(source: KvShares, target: KvShares, group: int, data: Sequence[Data]) -> list[Bytes]:
    """Return the bytes of one group's blocks for each rank of `target`, made from those of each rank of `source`.

    The bytes of a rank are whole blocks, one after the other, each with the `block_bytes` of that rank's own layout.

    Raises:
        ValueError: source and target keep different layers, tokens or formats, or the data has the wrong length.
    """
    blocks = _as_blocks(source, group, data)
    if stored_alike(source, target, group):
        return [block.reshape(-1) for block in blocks]
    check_specs(source.groups[0][group], target.groups[0][group])
    out = [np.zeros((len(blocks[0]), groups[group].block_bytes), dtype=np.uint8) for groups in target.groups]
    for index, (tensors, wanted) in enumerate(
        zip(source.groups[0][group].layers, target.groups[0][group].layers, strict=True)
    ):
        check_rows(tensors, wanted)
        for number in range(len(parts_of(tensors))):
            rows = _join(source, group, index, number, blocks)
            _cut(target, group, index, number, rows, out)
    return [block.reshape(-1) for block in out]


def _as_blocks(shares: KvShares, group: int, data: Sequence[Data]) -> list[Bytes]:
    """Return the data of each rank as [blocks, bytes of a block]."""
    if len(data) != shares.num_ranks:
        raise ValueError(f"data of {len(data)} ranks was given for a worker of {shares.num_ranks}.")
    if not 0 <= group < len(shares.groups[0]):
        raise ValueError(f"group {group} was given; there are {len(shares.groups[0])}.")
    blocks = []
    for rank, part in enumerate(data):
        flat = np.frombuffer(part, dtype=np.uint8)
        size = shares.groups[rank][group].block_bytes
        if flat.size % size:
            raise ValueError(f"rank {rank} gave {flat.size} bytes, which are no whole blocks of {size} bytes.")
        blocks.append(flat.reshape(-1, size))
    if len({len(part) for part in blocks}) > 1:
        raise ValueError(f"the ranks gave {', '.join(str(len(part)) for part in blocks)} blocks of group {group}.")
    return blocks


def stored_alike(source: KvShares, target: KvShares, group: int) -> bool:
    """Return whether both workers store a group's blocks alike on each rank, so that the bytes can be taken as they are."""

    def contents(shares: KvShares) -> list[object]:
        layers = shares.groups[0][group].spec.layers
        heads = [[share[layer] for layer in layers] for share in shares.heads]
        return [[(one[group].spec, one[group].layers, one[group].block_bytes) for one in shares.groups], heads]

    return contents(source) == contents(target)


def check_specs(source: GroupLayout, target: GroupLayout) -> None:
    """Raise ValueError unless both sides keep the same tokens of the same layers in a group."""
    if source.spec != target.spec or len(source.layers) != len(target.layers):
        raise ValueError(
            f"KV group {source.spec} of the source is not {target.spec} of the target; both must run the same model with equal "
            "--block-size, --window and --hybrid-kv-cache."
        )


def check_rows(source: LayerTensors, target: LayerTensors) -> None:
    """Check that two layers keep the same numbers in the same format, from which rows can be cut; raise ValueError if not."""

    def kept(tensors: LayerTensors) -> tuple[object, ...]:
        return tensors.layer, tensors.role, tensors.format, tensors.k_size, tensors.v_size

    # Rows of "uint8" without scales mix number formats, and only kernels can read them.
    is_mixed = source.dtype == "uint8" and source.k_scale_offset is None
    if kept(source) != kept(target) or is_mixed:
        raise ValueError(
            f"layer {source.layer} is kept in {source.format} by the source, with {source.k_size} and {source.v_size} elements, "
            f"and in {target.format} by the target, with {target.k_size} and {target.v_size}; that cannot be converted."
        )


def parts_of(tensors: LayerTensors) -> list[Part]:
    """Return the keys and the values of a layer as two parts, or as one if the same rows are both."""
    parts = [Part(tensors, tensors.k_offset, tensors.k_scale_offset, tensors.k_size)]
    if tensors.v_offset != tensors.k_offset:
        parts.append(Part(tensors, tensors.v_offset, tensors.v_scale_offset, tensors.v_size))
    return parts


def _rows_of(block: Bytes, group: GroupLayout, part: Part) -> Bytes:
    """Return a part of each block as a view [blocks, heads, rows, bytes of a row]; `block` is [blocks, bytes of a block]."""
    heads, rows, size = part.tensors.num_kv_heads, group.rows_per_block, part.size * DTYPE_BYTES[part.tensors.dtype]
    return block[:, part.offset : part.offset + heads * rows * size].reshape(len(block), heads, rows, size)


def _scales_of(block: Bytes, group: GroupLayout, part: Part) -> Bytes:
    """Return the scales of a part of each block as a view [blocks, heads, rows, 4]: float32, so 4 bytes per row."""
    assert part.scale_offset is not None
    heads, rows = part.tensors.num_kv_heads, group.rows_per_block
    end = part.scale_offset + heads * rows * 4
    return block[:, part.scale_offset : end].reshape(len(block), heads, rows, 4)


def heads_of(shares: KvShares, rank: int, tensors: LayerTensors) -> range:
    """Return the KV heads of a layer that a rank keeps. Raises ValueError if its layout has another number of heads."""
    first, end = shares.heads[rank][tensors.layer]
    if end - first != tensors.num_kv_heads:
        raise ValueError(
            f"rank {rank} keeps {tensors.num_kv_heads} KV heads of layer {tensors.layer}, not {end - first}."
        )
    return range(first, end)


def _join(shares: KvShares, group: int, index: int, number: int, blocks: list[Bytes]) -> _Rows:
    """Return one part (keys or values) of all KV heads, each head from the first rank that keeps it."""
    layers = [groups[group].layers[index] for groups in shares.groups]
    held = [heads_of(shares, rank, tensors) for rank, tensors in enumerate(layers)]
    num_heads = max(heads.stop for heads in held)
    data: list[Bytes] = []
    scales: list[Bytes] = []
    for head in range(num_heads):
        rank = next((rank for rank, heads in enumerate(held) if head in heads), None)
        if rank is None:
            raise ValueError(f"no rank keeps KV head {head} of layer {layers[0].layer}.")
        layout, part = shares.groups[rank][group], parts_of(layers[rank])[number]
        data.append(_rows_of(blocks[rank], layout, part)[:, head - held[rank].start])
        if part.scale_offset is not None:
            scales.append(_scales_of(blocks[rank], layout, part)[:, head - held[rank].start])
    return _Rows(np.stack(data, axis=1), np.stack(scales, axis=1) if scales else None)


def _cut(shares: KvShares, group: int, index: int, number: int, rows: _Rows, out: list[Bytes]) -> None:
    """Write each target rank's heads of one part into its blocks `out[rank]`."""
    for rank, block in enumerate(out):
        layout = shares.groups[rank][group]
        part = parts_of(layout.layers[index])[number]
        heads = heads_of(shares, rank, part.tensors)
        own = slice(heads.start, heads.stop)
        _rows_of(block, layout, part)[...] = rows.data[:, own]
        if rows.scales is not None:
            _scales_of(block, layout, part)[...] = rows.scales[:, own]

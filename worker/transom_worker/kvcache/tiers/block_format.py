"""Cuts and joins KV blocks by heads, for two workers that divide the KV heads among different numbers of ranks (`convert_blocks`);
`block_segments` says which bytes of a block each rank of one worker takes from which rank of the other one.

A *block* has the keys and values of some tokens in all layers of a KV cache group. Each tensor-parallel rank keeps the part for its
own KV heads; a recurrent layer's states and values are divided by its own heads. Latent rows (of MLA), and heads if there are more
ranks than heads, are kept as equal copies by several ranks. Example with 3 KV heads:

    source, 2 ranks      rank 0: heads 0 1      rank 1: head 2
    target, 3 ranks      rank 0: head 0         rank 1: head 1        rank 2: head 2
    target, 5 ranks      0: head 0     1: head 1     2: head 1     3: head 2     4: head 2

In a block the heads of a layer's keys K follow each other, then those of its values V. With 4 KV heads of one layer:

    source, 2 ranks      rank 0: K0 K1 V0 V1            rank 1: K2 K3 V2 V3
    target, 1 rank       K0 K1 K2 K3 V0 V1 V2 V3        takes K0 K1 and V0 V1 of rank 0, K2 K3 and V2 V3 of rank 1

Numbers are not converted: both workers have the same identity, which includes the number formats.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from transom_core.kv_cache.kv_shares import KvShares
from transom_core.kv_cache.layout import DTYPE_BYTES, GroupLayout, LayerTensors


class Segment(NamedTuple):
    """`size` bytes at `source` of a block of the source's `rank`, which belong at `target` of the target's block."""

    rank: int
    source: int
    target: int
    size: int


class _Part(NamedTuple):
    """Where the keys or the values of one layer lie in a block, as byte offsets."""

    offset: int
    scale_offset: int | None
    size: int  # elements of a row


def block_segments(source: KvShares, target: KvShares, group: int, rank: int) -> list[Segment]:
    """Return the segments of which a block of `group` on the target's `rank` consists.

    Raises:
        ValueError: source and target keep different layers, tokens or formats.
    """
    own = target.groups[rank][group]
    if _stored_alike(source, target, group):
        return [Segment(rank, 0, 0, own.block_bytes)]
    _check_specs(source.groups[0][group], own)
    segments: list[Segment] = []
    for index in range(len(own.layers)):
        _check_rows(source.groups[0][group].layers[index], own.layers[index])
        for one in _of_layer(source, target, group, rank, index):
            last = segments[-1] if segments else None
            if last and (last.rank, last.source + last.size, last.target + last.size) == one[:3]:
                segments[-1] = last._replace(size=last.size + one.size)
            else:
                segments.append(one)
    return segments


def _stored_alike(source: KvShares, target: KvShares, group: int) -> bool:
    """Return whether both workers store a group's blocks alike on each rank, so that the bytes can be taken as they are."""

    def contents(shares: KvShares) -> list[object]:
        layers = shares.groups[0][group].spec.layers
        heads = [[share[layer] for layer in layers] for share in (*shares.heads, *shares.states)]
        return [[(one[group].spec, one[group].layers, one[group].block_bytes) for one in shares.groups], heads]

    return contents(source) == contents(target)


def _check_specs(source: GroupLayout, target: GroupLayout) -> None:
    """Raise ValueError unless both sides keep the same tokens of the same layers in a group."""
    if source.spec != target.spec or len(source.layers) != len(target.layers):
        raise ValueError(
            f"KV group {source.spec} of the source is not {target.spec} of the target; both must run the same model with equal "
            "--block-size, --window and --hybrid-kv-cache."
        )


def _check_rows(source: LayerTensors, target: LayerTensors) -> None:
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


def _of_layer(source: KvShares, target: KvShares, group: int, rank: int, index: int) -> Iterator[Segment]:
    """Yield a segment for each head of each part of a layer: rows of keys or values, and their scales."""
    own = target.groups[rank][group]
    tensors = own.layers[index]
    holders = [
        _holder(source, group, index, head, rank / target.num_ranks) for head in _heads_of(target, rank, tensors)
    ]
    for number, part in enumerate(_parts_of(tensors)):
        for row_bytes, is_scale in ((part.size * DTYPE_BYTES[tensors.dtype], False), (4, True)):  # a scale is a float32
            for i, (holder, place) in enumerate(holders):
                theirs = _parts_of(source.groups[holder][group].layers[index])[number]
                here, there = (part.scale_offset, theirs.scale_offset) if is_scale else (part.offset, theirs.offset)
                if here is not None and there is not None:
                    size = own.rows_per_block * row_bytes
                    yield Segment(holder, there + place * size, here + i * size, size)


def _parts_of(tensors: LayerTensors) -> list[_Part]:
    """Return the keys and the values of a layer as two parts, or as one if the same rows are both."""
    parts = [_Part(tensors.k_offset, tensors.k_scale_offset, tensors.k_size)]
    if tensors.v_offset != tensors.k_offset:
        parts.append(_Part(tensors.v_offset, tensors.v_scale_offset, tensors.v_size))
    return parts


def _heads_of(shares: KvShares, rank: int, tensors: LayerTensors) -> range:
    """Return the heads of a layer's tensors that a rank keeps. Raises ValueError if its layout has another number of heads."""
    first, end = (shares.states if tensors.by_state else shares.heads)[rank][tensors.layer]
    if end - first != tensors.num_kv_heads:
        raise ValueError(f"rank {rank} keeps {tensors.num_kv_heads} heads of layer {tensors.layer}, not {end - first}.")
    return range(first, end)


def _holder(source: KvShares, group: int, index: int, head: int, share: float) -> tuple[int, int]:
    """Return a rank of the source that keeps a head, and the head's place there.

    Of several ranks with equal copies, target ranks take different ones: `share` is the target rank's number as a part of all.
    """
    ranks = [
        (rank, head - held.start)
        for rank in range(source.num_ranks)
        if head in (held := _heads_of(source, rank, source.groups[rank][group].layers[index]))
    ]
    if not ranks:
        raise ValueError(f"no rank keeps KV head {head} of group {group}.")
    return ranks[int(share * len(ranks))]


Bytes = NDArray[np.uint8]
Data = bytes | bytearray | memoryview | Bytes


def convert_blocks(source: KvShares, target: KvShares, group: int, data: Sequence[Data]) -> list[Bytes]:
    """Return the bytes of one group's blocks for each rank of `target`, made from those of each rank of `source`.

    The bytes of a rank are whole blocks, one after the other, each with the `block_bytes` of that rank's own layout.

    Raises:
        ValueError: source and target keep different layers, tokens or formats, or the data has the wrong length.
    """
    blocks = _as_blocks(source, group, data)
    out = []
    for rank, groups in enumerate(target.groups):
        segments, size = block_segments(source, target, group, rank), groups[group].block_bytes
        if len(segments) == 1 and segments[0].size == size == blocks[segments[0].rank].shape[1]:
            out.append(blocks[segments[0].rank])  # whole blocks are taken as they are
            continue
        out.append(np.zeros((len(blocks[0]), size), dtype=np.uint8))
        for one in segments:
            out[-1][:, one.target : one.target + one.size] = blocks[one.rank][:, one.source : one.source + one.size]
    return [block.reshape(-1) for block in out]


def block_digest(source: KvShares, target: KvShares, group: int, rank: int, block: Bytes) -> bytes:
    """Return a digest of a block of the target's `rank`. It covers the segments that were read from the source, and not the padding
    between them. It is CRC-32, since it has to find faults, not forgers, and fetches wait for it: 4 GB/s, not BLAKE2b's 0.7."""
    digest = 0
    for one in block_segments(source, target, group, rank):
        digest = crc32(block[one.target : one.target + one.size].data, digest)
    return digest.to_bytes(4)


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

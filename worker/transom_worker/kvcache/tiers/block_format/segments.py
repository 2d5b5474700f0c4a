"""Says which bytes of a block each rank of one worker reads from which rank of another one (`block_segments`).

`convert` cuts and joins whole blocks by KV heads. Here each rank of the target finds its own heads in the source's blocks, so that
only these bytes are read. Example with 4 KV heads of one layer, keys K and values V:

    source, 2 ranks      rank 0: K0 K1 V0 V1            rank 1: K2 K3 V2 V3
    target, 1 rank       K0 K1 K2 K3 V0 V1 V2 V3        reads K0 K1 and V0 V1 of rank 0, K2 K3 and V2 V3 of rank 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transom_core.kv_cache.kv_shares import KvShares
from transom_core.kv_cache.layout import DTYPE_BYTES
from transom_worker.kvcache.tiers.block_format.convert import (
    Data,
    check_rows,
    check_specs,
    heads_of,
    parts_of,
    stored_alike,
)


class Segment(NamedTuple):
    """`size` bytes at `source` of a block of the source's `rank`, which belong at `target` of the target's block."""

    rank: int
    source: int
    target: int
    size: int


def block_segments(source: KvShares, target: KvShares, group: int, rank: int) -> list[Segment]:
    """Return the segments of which a block of `group` on the target's `rank` consists.

    Raises:
        ValueError: source and target keep different layers, tokens or formats.
    """
    own = target.groups[rank][group]
    if stored_alike(source, target, group):
        return [Segment(rank, 0, 0, own.block_bytes)]
    check_specs(source.groups[0][group], own)
    segments: list[Segment] = []
    for index in range(len(own.layers)):
        check_rows(source.groups[0][group].layers[index], own.layers[index])
        for one in _of_layer(source, target, group, rank, index):
            last = segments[-1] if segments else None
            if last and (last.rank, last.source + last.size, last.target + last.size) == one[:3]:
                segments[-1] = last._replace(size=last.size + one.size)
            else:
                segments.append(one)
    return segments


def same_contents(
    source: KvShares, target: KvShares, group: int, found: Sequence[Data], wanted: Sequence[Data]
) -> bool:
    """Return whether blocks of each of the target's ranks are equal, apart from the padding between segments, which is not read."""
    for rank, pair in enumerate(zip(found, wanted, strict=True)):
        own, other = (
            np.frombuffer(data, np.uint8).reshape(-1, target.groups[rank][group].block_bytes) for data in pair
        )
        for _, _, at, size in block_segments(source, target, group, rank):
            if not np.array_equal(own[:, at : at + size], other[:, at : at + size]):
                return False
    return True


def _of_layer(source: KvShares, target: KvShares, group: int, rank: int, index: int) -> Iterator[Segment]:
    """Yield a segment for each head of each part of a layer: rows of keys or values, and their scales."""
    own = target.groups[rank][group]
    tensors = own.layers[index]
    holders = [_holder(source, group, index, head, rank / target.num_ranks) for head in heads_of(target, rank, tensors)]
    for number, part in enumerate(parts_of(tensors)):
        for row_bytes, is_scale in ((part.size * DTYPE_BYTES[tensors.dtype], False), (4, True)):  # a scale is a float32
            for i, (holder, place) in enumerate(holders):
                theirs = parts_of(source.groups[holder][group].layers[index])[number]
                here, there = (part.scale_offset, theirs.scale_offset) if is_scale else (part.offset, theirs.offset)
                if here is not None and there is not None:
                    size = own.rows_per_block * row_bytes
                    yield Segment(holder, there + place * size, here + i * size, size)


def _holder(source: KvShares, group: int, index: int, head: int, share: float) -> tuple[int, int]:
    """Return a rank of the source that keeps a head, and the head's place there.

    Of several ranks with equal copies, target ranks take different ones: `share` is the target rank's number as a part of all.
    """
    ranks = [
        (rank, head - held.start)
        for rank in range(source.num_ranks)
        if head in (held := heads_of(source, rank, source.groups[rank][group].layers[index]))
    ]
    if not ranks:
        raise ValueError(f"no rank keeps KV head {head} of group {group}.")
    return ranks[int(share * len(ranks))]

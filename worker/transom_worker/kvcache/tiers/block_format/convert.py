"""Cuts and joins KV blocks by heads, for two workers that divide the KV heads among different numbers of ranks, by `segments`."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from transom_core.kv_cache.kv_shares import KvShares
from transom_worker.kvcache.tiers.block_format.segments import block_segments

Bytes = NDArray[np.uint8]
Data = bytes | bytearray | memoryview | Bytes

DIGEST_BYTES = 16


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
    between them."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for one in block_segments(source, target, group, rank):
        digest.update(block[one.target : one.target + one.size].data)
    return digest.digest()


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

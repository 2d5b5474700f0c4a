"""What each rank of a target reads of the source's blocks is what whole blocks are converted to, for every pair of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.matrices import matrix
from tests.worker.kvcache.tiers.block_format.test_convert import (
    FORMATS,
    FULL,
    LATENT,
    NUM_BLOCKS,
    RANKS,
    WINDOW,
    shares,
    whole_numbers,
    write,
)
from transom_worker.kvcache.tiers.block_format.segments import block_segments, same_contents


@pytest.mark.parametrize(("source", "target", "kv_format"), matrix(RANKS, RANKS, FORMATS))
def test_every_pair_of_sizes(source: int, target: int, kv_format: str) -> None:
    before, after = shares(source, (kv_format, "float32")), shares(target, (kv_format, "float32"))
    for group in (FULL, LATENT, WINDOW):
        whole = whole_numbers(before, group)
        there = [np.frombuffer(part, np.uint8).reshape(NUM_BLOCKS, -1) for part in write(whole, before, group)]
        wanted = write(whole, after, group)
        got = [np.zeros((NUM_BLOCKS, groups[group].block_bytes), np.uint8) for groups in after.groups]
        for rank, blocks in enumerate(got):
            for one in block_segments(before, after, group, rank):
                blocks[:, one.target : one.target + one.size] += there[one.rank][:, one.source : one.source + one.size]
        assert [blocks.tobytes() for blocks in got] == wanted  # added, so nothing is read twice
        assert same_contents(before, after, group, [blocks.reshape(-1) for blocks in got], wanted)
        got[-1][-1, 0] ^= 1
        assert not same_contents(before, after, group, [blocks.reshape(-1) for blocks in got], wanted)


def test_neighbours_are_one_segment_and_copies_are_read_from_several_ranks() -> None:
    two, one = shares(2), shares(1)
    assert [len(block_segments(one, one, group, 0)) for group in (FULL, LATENT, WINDOW)] == [1, 1, 1]
    assert [one.rank for one in block_segments(shares(3), two, LATENT, 1)] == [1]
    with pytest.raises(ValueError, match="cannot be converted"):
        block_segments(shares(2, ("int8", "float32")), one, FULL, 0)
    with pytest.raises(ValueError, match="no rank keeps KV head"):
        block_segments(replace(two, groups=two.groups[:1], heads=two.heads[:1]), one, FULL, 0)

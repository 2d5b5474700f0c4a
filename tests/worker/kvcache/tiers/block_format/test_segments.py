"""Which bytes a rank takes from which one; `test_convert` has every pair of ranks and formats."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.worker.kvcache.tiers.block_format.test_convert import FULL, LATENT, RANKS, WINDOW, shares
from transom_worker.kvcache.tiers.block_format.segments import block_segments


def test_neighbours_are_one_segment_and_copies_are_taken_from_several_ranks() -> None:
    one = shares(1)
    assert [len(block_segments(one, one, group, 0)) for group in (FULL, LATENT, WINDOW)] == [1, 1, 1]
    assert [one.rank for one in block_segments(shares(3), shares(2), LATENT, 1)] == [1]


@pytest.mark.parametrize("source", RANKS)
def test_no_byte_is_taken_twice(source: int) -> None:
    for group in (FULL, LATENT, WINDOW):
        spans = sorted((at, at + size) for _, _, at, size in block_segments(shares(source), shares(2), group, 1))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_a_head_that_no_rank_keeps_is_said() -> None:
    two = shares(2)
    with pytest.raises(ValueError, match="no rank keeps KV head"):
        block_segments(replace(two, groups=two.groups[:1], heads=two.heads[:1]), shares(1), FULL, 0)

"""Block copies by every implementation: as one after the other, at the edges of an item, no byte beside them."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from transom_kernels.block_copy import block_copy, block_copy_between
from transom_kernels.block_copy.op import ITEM_BYTES, block_copy_reference
from transom_kernels.launch import INTERPRETED, Kernels, prefer

INTERPRETER = pytest.param("interpreted", marks=pytest.mark.skipif(not INTERPRETED, reason="there is a GPU"))
SIZES = [1, 20, 21, 63, 64, 65, ITEM_BYTES - 1, ITEM_BYTES, ITEM_BYTES + 1, 2 * ITEM_BYTES + 100]
PAIRS = [(0, 3), (1, 2), (3, 0), (2, 2), (2, 1)]
PAIRS_BETWEEN = [(4, 0), (1, 2), (4, 3), (0, 2)]  # block 2 has the contents of the last copy


def compare(num_bytes: int) -> None:
    wanted = torch.randint(0, 255, (4, num_bytes + 12), dtype=torch.uint8)
    got = wanted.clone()
    block_copy_reference(wanted[:, 4 : num_bytes + 4], PAIRS)
    block_copy(got[:, 4 : num_bytes + 4], PAIRS)
    assert got.equal(wanted)
    source = torch.randint(0, 255, (5, num_bytes + 8), dtype=torch.uint8)
    for first, to in PAIRS_BETWEEN:
        wanted[to, 8 : num_bytes + 8] = source[first, 4 : num_bytes + 4]
    block_copy_between(source[:, 4 : num_bytes + 4], got[:, 8 : num_bytes + 8], PAIRS_BETWEEN)
    assert got.equal(wanted)


@pytest.mark.parametrize("kernels", ["reference", "auto", INTERPRETER])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_block_copy(num_bytes: int, kernels: Kernels) -> None:
    with prefer(kernels):
        compare(num_bytes)


@pytest.mark.parametrize("kernels", ["auto", INTERPRETER])
@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_any_copies_are_as_one_after_the_other(kernels: Kernels, pairs: list[tuple[int, int]]) -> None:
    wanted = torch.randint(0, 255, (6, 40), dtype=torch.uint8)
    got = wanted.clone()
    for first, to in pairs:
        wanted[to, :32] = wanted[first, :32].clone()
    with prefer(kernels):
        block_copy(got[:, :32], pairs)
    assert got.equal(wanted)


def test_what_does_not_fit_is_refused() -> None:
    blocks = torch.zeros(6, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="copy 0 -> 6"):
        block_copy(blocks, [(0, 6)])
    for pair in [(6, 0), (0, 6), (-1, 0)]:
        with pytest.raises(ValueError, match="leaves the 6 and 6 block ids"):
            block_copy_between(blocks, blocks.clone(), [pair])
    with pytest.raises(ValueError, match="cannot be copied to blocks"):
        block_copy_between(blocks, blocks[:, 1:].clone(), [(0, 0)])


def small_case() -> None:
    compare(100)

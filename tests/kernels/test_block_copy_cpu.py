"""The CPU kernel of block copies: blocks at the edges of an item, no byte beside them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_kernels.block_copy import block_copy, block_copy_between
from transom_kernels.block_copy.cpu import ITEM_BYTES
from transom_kernels.block_copy.op import block_copy_reference
from transom_kernels.launch import uses_cpu_kernels

PAIRS = [(0, 3), (1, 2), (3, 0), (2, 2), (2, 1)]


def compare(num_bytes: int) -> None:
    wanted = torch.randint(0, 255, (4, num_bytes + 9), dtype=torch.uint8)
    got = wanted.clone()
    assert uses_cpu_kernels(got)
    block_copy_reference(wanted[:, 3 : num_bytes + 3], PAIRS)
    block_copy(got[:, 3 : num_bytes + 3], PAIRS)
    assert got.equal(wanted)


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 65, ITEM_BYTES - 1, ITEM_BYTES, ITEM_BYTES + 1, 2 * ITEM_BYTES + 100])
def test_block_copy(num_bytes):
    compare(num_bytes)


def compare_between(num_bytes: int) -> None:
    source = torch.randint(0, 255, (5, num_bytes + 9), dtype=torch.uint8)
    wanted = torch.randint(0, 255, (4, num_bytes + 4), dtype=torch.uint8)
    got = wanted.clone()
    pairs = [(4, 0), (1, 2), (4, 3), (0, 2)]  # block 2 has the contents of the last copy
    for first, to in pairs:
        wanted[to, 1 : num_bytes + 1] = source[first, 3 : num_bytes + 3]
    block_copy_between(source[:, 3 : num_bytes + 3], got[:, 1 : num_bytes + 1], pairs)
    assert got.equal(wanted)


@pytest.mark.parametrize("num_bytes", [1, 64, ITEM_BYTES + 1])
def test_block_copy_between_memories(num_bytes):
    compare_between(num_bytes)


def small_case() -> None:
    compare(100)
    compare_between(100)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_any_copies_are_as_one_after_the_other(pairs):
    wanted = torch.randint(0, 255, (6, 40), dtype=torch.uint8)
    got = wanted.clone()
    block_copy_reference(wanted[:, :32], pairs)
    block_copy(got[:, :32], pairs)
    assert got.equal(wanted)


def test_foreign_ids_are_refused():
    with pytest.raises(ValueError, match="copy 0 -> 6"):
        block_copy(torch.zeros(6, 4), [(0, 6)])

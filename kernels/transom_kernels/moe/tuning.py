"""Tiles of the grouped products by how many rows an expert gets."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows, columns and inner elements of a round; warps and pipeline stages."""

    block_m: int
    block_n: int
    block_j: int
    num_warps: int
    num_stages: int


SMALL = Tile(block_m=16, block_n=64, block_j=128, num_warps=4, num_stages=3)  # few rows: reading weights is all
MIDDLE = Tile(block_m=64, block_n=64, block_j=64, num_warps=4, num_stages=3)
LARGE = Tile(block_m=128, block_n=64, block_j=64, num_warps=8, num_stages=3)
TILES = (SMALL, MIDDLE, LARGE)


WIDENING = (  # of MXFP4 weights, in registers that several warps must share
    replace(SMALL, num_warps=8),  # with four triton 3.6 spills
    replace(MIDDLE, block_n=32, num_warps=8),
    replace(LARGE, block_n=32),
)


EXACT = replace(SMALL, block_n=32, block_j=32, num_stages=2)  # in float32, without tensor cores


def choose_tile(num_pairs: int, num_experts: int, *, is_mx: bool, element_bytes: int) -> Tile:
    """By the mean number of rows of an expert."""
    if element_bytes > 2:
        return EXACT
    rows = num_pairs / num_experts
    return (WIDENING if is_mx else TILES)[0 if rows <= 16 else 1 if rows <= 96 else 2]

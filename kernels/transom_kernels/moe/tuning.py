"""Tile sizes of the grouped matmuls, by the mean number of rows per expert."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows, columns and inner elements of an iteration; warps and pipeline stages."""

    block_m: int
    block_n: int
    block_j: int
    num_warps: int
    num_stages: int


SMALL = Tile(
    block_m=16, block_n=64, block_j=128, num_warps=4, num_stages=3
)  # few rows: the time goes into reading weights
MIDDLE = Tile(block_m=64, block_n=64, block_j=64, num_warps=4, num_stages=3)
LARGE = Tile(block_m=128, block_n=64, block_j=64, num_warps=8, num_stages=3)
TILES = (SMALL, MIDDLE, LARGE)


MXFP4_TILES = (  # MXFP4 weights are dequantised in registers, which more warps must share
    replace(SMALL, num_warps=8),  # with four warps Triton 3.6 spills registers
    replace(MIDDLE, block_n=32, num_warps=8),
    replace(LARGE, block_n=32),
)


FLOAT32_TILE = replace(SMALL, block_n=32, block_j=32, num_stages=2)  # float32, without tensor cores


def choose_tile(num_pairs: int, num_experts: int, *, is_mx: bool, element_bytes: int) -> Tile:
    """The tile for this many pairs of token and expert."""
    if element_bytes > 2:
        return FLOAT32_TILE
    rows = num_pairs / num_experts
    return (MXFP4_TILES if is_mx else TILES)[0 if rows <= 16 else 1 if rows <= 96 else 2]

"""Tiles of the latent kernels by shape."""

from __future__ import annotations

from dataclasses import dataclass

from transom_kernels.launch import next_power_of_two

LEAST_ROWS = 16  # of a product on tensor cores


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Heads and slots of a round, warps, pipeline stages."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def attend_config(num_heads: int, width: int, element_bytes: int) -> LatentConfig:
    """A row of 512 is 1 KiB: few of them fit beside the accumulators of many heads."""
    wide = width * element_bytes > 512
    if element_bytes > 2:  # products without tensor cores, for exactness alone
        return LatentConfig(block_h=LEAST_ROWS, block_n=16 if wide else 32, num_warps=8, num_stages=1)
    block_h = min(32 if wide else 64, max(LEAST_ROWS, next_power_of_two(num_heads)))
    return LatentConfig(
        block_h=block_h, block_n=32 if wide else 64, num_warps=8 if block_h > 16 else 4, num_stages=2 if wide else 3
    )


def score_config(num_heads: int, width: int, element_bytes: int) -> LatentConfig:
    """All heads of a query against a block of keys."""
    if element_bytes > 2:
        return LatentConfig(block_h=LEAST_ROWS, block_n=32, num_warps=4, num_stages=1)
    block_h = min(64, max(LEAST_ROWS, next_power_of_two(num_heads)))
    return LatentConfig(block_h=block_h, block_n=64, num_warps=4, num_stages=2)

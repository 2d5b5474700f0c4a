"""Tiles of the latent kernels by shape."""

from __future__ import annotations

from dataclasses import dataclass

from transom_kernels.launch import next_power_of_two

MIN_DOT_ROWS = 16  # of a product on tensor cores
SCORE_BYTES = 64 << 20  # of scores at once, however many queries and entries there are
SCORE_ROUNDS = 8  # of a program, where queries alone fill the device
MANY_QUERIES = 128
POOL_CHANNELS = 64
POOL_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Heads and slots of a round, warps, pipeline stages.

    Slots are fetched a stage before the rows that they name: five stages keep one round of rows in flight, seven keep two.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def attend_config(num_heads: int, width: int, element_bytes: int) -> LatentConfig:
    """A row of 512 is 1 KiB, and accumulators of 64 heads of them do not fit into registers."""
    wide = width * element_bytes > 512
    if element_bytes > 2:  # products without tensor cores, for exactness alone
        return LatentConfig(block_h=MIN_DOT_ROWS, block_n=16 if wide else 32, num_warps=8, num_stages=1)
    block_h = min(32 if wide else 64, max(MIN_DOT_ROWS, next_power_of_two(num_heads)))
    return LatentConfig(
        block_h=block_h,
        block_n=32 if wide else 64,
        num_warps=8,
        num_stages=7 if wide and block_h == MIN_DOT_ROWS else 5,
    )


def score_config(num_heads: int, width: int, element_bytes: int) -> LatentConfig:
    """All heads of a query against a block of keys."""
    block_h = max(MIN_DOT_ROWS, next_power_of_two(num_heads))
    if element_bytes > 2:
        return LatentConfig(block_h=block_h, block_n=16, num_warps=8, num_stages=1)
    return LatentConfig(block_h=block_h, block_n=64, num_warps=4, num_stages=5)


def score_rounds(num_queries: int) -> int:
    """Blocks of keys of a program: where there are many queries it keeps its own for several, else more programs share keys out."""
    return SCORE_ROUNDS if num_queries >= MANY_QUERIES else 1


def queries_at_once(num_entries: int) -> int:
    """Queries whose scores of so many entries take at most `SCORE_BYTES`; at least 1.

    Multiples of 16 where there are so many: rows of later pieces then lie as well aligned as the first, and need no kernel of
    their own.
    """
    most = max(1, SCORE_BYTES // (4 * max(1, num_entries)))
    return most if most < 16 else most // 16 * 16

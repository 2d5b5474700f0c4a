"""Tile sizes of the latent attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

from transom_kernels.launch import next_power_of_two

MIN_DOT_ROWS = 16  # the least rows of a product on tensor cores
SCORE_BYTES = 64 << 20  # of the indexer's scores at once: bounds memory for any number of queries and entries
SCORE_ROUNDS = 8  # blocks of keys per program where the queries alone fill the device
MANY_QUERIES = 128  # from this many queries on, queries alone fill the device
SEVEN_STAGES_BYTES = 117_248  # of shared memory, for 16 heads of a width of 512: more than sm_86, sm_89 and sm_120 have
POOL_CHANNELS = 64  # of an entry that a program of `pool` computes
POOL_ROWS = 16  # of an entry that `pool` reads at once


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Heads and rows of an iteration, warps, pipeline stages.

    Slots are fetched a stage before the rows that they name: five stages keep one iteration's rows in flight, seven keep two.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def attend_config(num_heads: int, width: int, element_bytes: int, shared_bytes: int) -> LatentConfig:
    """The configuration of `attend_rows` on a device whose programs may have `shared_bytes` of shared memory.

    A row of 512 is 1 KiB, and accumulators of 64 heads of that width do not fit in registers.
    """
    wide = width * element_bytes > 512
    if element_bytes > 2:  # float32: products without tensor cores, for exactness, not for speed
        return LatentConfig(block_h=MIN_DOT_ROWS, block_n=16 if wide else 32, num_warps=8, num_stages=1)
    block_h = min(32 if wide else 64, max(MIN_DOT_ROWS, next_power_of_two(num_heads)))
    has_seven = wide and block_h == MIN_DOT_ROWS and shared_bytes >= SEVEN_STAGES_BYTES
    return LatentConfig(block_h=block_h, block_n=32 if wide else 64, num_warps=8, num_stages=7 if has_seven else 5)


def score_config(num_heads: int, width: int, element_bytes: int) -> LatentConfig:
    """The configuration of `score_entries`: all heads of one query times a block of keys."""
    block_h = max(MIN_DOT_ROWS, next_power_of_two(num_heads))
    if element_bytes > 2:
        return LatentConfig(block_h=block_h, block_n=16, num_warps=8, num_stages=1)
    return LatentConfig(block_h=block_h, block_n=64, num_warps=4, num_stages=5)


def score_rounds(num_queries: int) -> int:
    """Blocks of keys per program: several where many queries fill the device, so that a program keeps its query; else one."""
    return SCORE_ROUNDS if num_queries >= MANY_QUERIES else 1


def queries_at_once(num_entries: int) -> int:
    """Queries whose scores of `num_entries` entries take at most `SCORE_BYTES`; at least 1.

    From 16 on it is a multiple of 16, so that rows of all tiles are equally aligned: Triton compiles a kernel for each alignment.
    """
    most = max(1, SCORE_BYTES // (4 * max(1, num_entries)))
    return most if most < 16 else most // 16 * 16

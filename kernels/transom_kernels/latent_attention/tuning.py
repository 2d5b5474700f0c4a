"""The tile sizes of the Triton kernels of latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from transom_kernels.launch import next_power_of_two

MIN_DOT_ROWS = 16  # least rows of a product on tensor cores
SCORE_BYTES = 64 << 20  # memory of the indexer's scores at once, for any number of queries and entries
SCORE_ROUNDS = 8  # blocks of keys per program if there are MANY_QUERIES
MANY_QUERIES = 128  # from this many queries on, one program per query fills the device
# shared memory of seven stages for 16 heads of width 512: more than sm_86, sm_89 and sm_120 have
SEVEN_STAGES_BYTES = 117_248
POOL_CHANNELS = 64  # channels of an entry that a program of `pool` computes
POOL_ROWS = 16  # rows of an entry that `pool` reads at once


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Heads and rows of an iteration, warps, and pipeline stages.

    Slots are fetched a stage before the rows that they name. With five stages the loads of one iteration's rows are in flight
    while another is computed, with seven those of two.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def attend_config(num_heads: int, width: int, element_bytes: int, shared_bytes: int) -> LatentConfig:
    """Return the configuration of `attend_rows` on a device whose programs may have `shared_bytes` of shared memory.

    Rows of 512 16-bit numbers (1 KiB) count as wide: accumulators of 64 heads of that width do not fit in registers.
    """
    wide = width * element_bytes > 512
    if element_bytes > 2:  # float32: products without tensor cores, for exactness, not for speed
        return LatentConfig(block_h=MIN_DOT_ROWS, block_n=16 if wide else 32, num_warps=8, num_stages=1)
    block_h = min(32 if wide else 64, max(MIN_DOT_ROWS, next_power_of_two(num_heads)))
    has_seven = wide and block_h == MIN_DOT_ROWS and shared_bytes >= SEVEN_STAGES_BYTES
    return LatentConfig(block_h=block_h, block_n=32 if wide else 64, num_warps=8, num_stages=7 if has_seven else 5)


def score_config(num_heads: int, width: int, element_bytes: int) -> LatentConfig:
    """Return the configuration of `score_entries`, which multiplies all heads of one query by a block of keys."""
    block_h = max(MIN_DOT_ROWS, next_power_of_two(num_heads))
    if element_bytes > 2:
        return LatentConfig(block_h=block_h, block_n=16, num_warps=8, num_stages=1)
    return LatentConfig(block_h=block_h, block_n=64, num_warps=4, num_stages=5)


def score_rounds(num_queries: int) -> int:
    """Return the blocks of keys per program: several if the queries fill the device, so that queries are loaded less often."""
    return SCORE_ROUNDS if num_queries >= MANY_QUERIES else 1


def queries_at_once(num_entries: int) -> int:
    """Return how many queries may be scored at once so that their scores take at most `SCORE_BYTES`; at least 1.

    From 16 on it is a multiple of 16, so that all tiles are equally aligned: Triton compiles a kernel for each alignment.
    """
    most = max(1, SCORE_BYTES // (4 * max(1, num_entries)))
    return most if most < 16 else most // 16 * 16

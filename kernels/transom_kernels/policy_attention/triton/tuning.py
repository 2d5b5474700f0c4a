"""Chooses tile sizes of the Triton kernels of `policy_attention`.

Memory-bound decoding takes tiles of 16 rows, the least for a product on tensor cores; prompts take 64. These kernels compute only
the rows of a step that have a policy, so there is one configuration for each kind, chosen to fit registers and shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_DOT_ROWS = 16
PROMPT_ROWS = 64
# The most registers that a thread can have. Without this limit ptxas spills one or two of them so that one more program fits on
# a multiprocessor.
MAX_REGISTERS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """The constants for which kernels are compiled: tokens and rows of a tile, keys of an iteration, warps, pipeline stages."""

    tokens: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_config(*, group: int, widest: int, element_bytes: int, cache_bytes: int, decodes: bool) -> TileConfig:
    """Return the configuration for `group` query heads per KV head with at most `widest` numbers each.

    An element of queries has `element_bytes` bytes, one of the cache `cache_bytes`.
    """
    wanted = group if decodes else max(group, PROMPT_ROWS if element_bytes <= 2 and widest <= 128 else MIN_DOT_ROWS)
    block_m = MIN_DOT_ROWS
    while block_m < wanted:
        block_m *= 2
    is_widened = cache_bytes < element_bytes  # rows of quantised caches take registers twice, as stored and widened
    block_n = 16 if element_bytes > 2 else 64 if widest <= (64 if is_widened else 128) else 32
    is_large = widest * element_bytes > 512 or ((widest > 64 or is_widened) and block_m > MIN_DOT_ROWS)
    return TileConfig(
        tokens=1 if decodes else block_m // group,
        block_m=block_m,
        block_n=block_n,
        num_warps=8 if is_large else 4,  # 4 warps lack registers for large tiles on sm_80 and sm_100
        num_stages=1 if element_bytes > 2 else 2,
    )

"""Sizes of the Triton path by shape: what each program holds, and its warps and stages."""

from __future__ import annotations

from dataclasses import dataclass

from transom_kernels.paged_attention.work import Tiling

FEW_TOKENS = 4  # sequences with up to so many new tokens are cut along their keys
DECODE_SPLIT_KEYS = 1024
COMBINED_AT_ONCE = 16  # splits of a round
LEAST_ROWS = 16  # of a product on tensor cores
PROMPT_ROWS = 128
# A round's blocks are looked up before its keys and values are fetched, so each takes half of the stages: five keep one round in
# flight while another is computed. With three or four nothing is, and a program that has its processor for itself waits.
HOPPER_PROMPT_STAGES = 5
LONG_PIPELINE_ROUND_BYTES = 32 << 10  # of keys and values; of larger ones two leave no shared memory for queries


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """Rows and keys of a program's tiles, warps, pipeline stages, and those on Hopper."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    hopper_stages: int


def kernel_config(*, rows: int, key_size: int, value_size: int, block_size: int, element_bytes: int) -> KernelConfig:
    """For tiles of at most `rows` rows (tokens times query heads of a KV head).

    A round has at least `block_size` keys: a cache block's where results are wanted block by block, else 1.
    """
    block_m = LEAST_ROWS
    while block_m < rows:
        block_m *= 2
    widest = max(key_size, value_size)
    if element_bytes > 2:  # products without tensor cores, for exactness alone
        num_warps = 4 if block_m > LEAST_ROWS and 64 < widest < 96 else 8  # 80 wide, more warps spill
        block_n = max(LEAST_ROWS, block_size)
        return KernelConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=1, hopper_stages=1)
    if block_m <= 32:  # decoding: memory-bound, keep several loads in flight
        block_n = 128 if widest * element_bytes <= 128 else 64 if widest * element_bytes <= 512 else 32
        num_warps = 8 if block_m * widest * element_bytes > 32 * 256 else 4  # accumulators need the registers of more
        block_n = max(block_n, block_size)
        return KernelConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=3, hopper_stages=3)
    small = widest * element_bytes <= 256
    block_n, num_stages = max(64 if small else 32, block_size), 3 if small else 2
    is_long = block_n * (key_size + value_size) * element_bytes <= LONG_PIPELINE_ROUND_BYTES
    hopper_stages = HOPPER_PROMPT_STAGES if is_long else num_stages
    return KernelConfig(
        block_m=block_m, block_n=block_n, num_warps=8, num_stages=num_stages, hopper_stages=hopper_stages
    )


def stages_on(config: KernelConfig, capability: tuple[int, int]) -> int:
    """Pipeline stages of a tile on a device: the longer pipeline takes Hopper's registers and its 227 KiB of shared memory.

    Later is not larger: of what came after Hopper, 12.x has 99 KiB, and 9.4 is what another vendor's devices call themselves.
    """
    return config.hopper_stages if capability == (9, 0) else config.num_stages


def tilings(*, group: int, key_size: int, element_bytes: int, cache_bytes: int) -> tuple[Tiling, ...]:
    """How sequences are cut, by their new tokens: one, a few, or a prompt's, where `group` query heads share a KV head.

    Each kind has tiles of its own, so that a sequence's result does not depend on which kinds are beside it.
    """
    tokens = max(1, _prompt_rows(key_size * element_bytes, element_bytes, cache_bytes) // group)
    return (
        Tiling(least=1, most=1, tile_tokens=1, split_keys=DECODE_SPLIT_KEYS),
        Tiling(least=2, most=FEW_TOKENS, tile_tokens=min(FEW_TOKENS, tokens), split_keys=DECODE_SPLIT_KEYS),
        Tiling(least=FEW_TOKENS + 1, most=2**31 - 1, tile_tokens=tokens, split_keys=0),
    )


def _prompt_rows(row_bytes: int, element_bytes: int, cache_bytes: int) -> int:
    """Wide rows, and those of 8 bits that are widened, leave registers for fewer of them."""
    if element_bytes > 2:
        return LEAST_ROWS
    if row_bytes > 512:
        return PROMPT_ROWS // 4
    return PROMPT_ROWS // 2 if row_bytes > 384 or cache_bytes < 2 else PROMPT_ROWS

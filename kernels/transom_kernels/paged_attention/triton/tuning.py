"""Chooses tile sizes, warps and pipeline stages of the Triton kernels, by the shape of a layer's attention.

A *tile* is a group of query tokens of one sequence with the query heads of one KV head; its *rows* are tokens times heads. An
*iteration* of the kernel `attend` reads `block_n` keys. `num_stages` is Triton's software pipelining depth.
"""

from dataclasses import dataclass

from transom_kernels.launch import MAX_REGISTERS, next_power_of_two
from transom_kernels.paged_attention.triton.work_items import NO_LIMIT, Tiling

FEW_TOKENS = 4  # sequences with up to this many new tokens have a tiling, and so a smaller tile, of their own
SPLIT_UNIT_BYTES = 16 << 10  # of keys and values: splits along keys end at multiples of this (split-KV)
MAX_PARTIAL_BYTES = 64 << 20  # of a launch's partial results; a step with more has several launches
COMBINED_AT_ONCE = 16  # splits that an iteration of `combine` reads
MIN_DOT_ROWS = 16  # least rows of a product on tensor cores
PROMPT_ROWS = 128  # rows of a prompt's tile
# An iteration looks up its blocks and then fetches their keys and values, and each of the two takes half of the stages. With five
# stages one iteration's loads are in flight while another is computed, with seven two are. With three or four none are: a program
# that has its streaming multiprocessor for itself would wait.
LONG_PIPELINE_STAGES, DECODE_STAGES = 5, 7
# most bytes of an iteration's keys and values for five stages: two larger iterations would leave no shared memory for queries
LONG_PIPELINE_ROUND_BYTES = 32 << 10
DECODE_ROUND_BYTES = 16 << 10  # of an iteration in decoding: three, for four programs on a multiprocessor of 9.0
HOPPER = (9, 0)
DECODE_REGISTERS = 128  # of a thread: four programs of four warps fit on a multiprocessor


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """The constants for which `attend` is compiled: rows of a tile, keys of an iteration, warps, pipeline stages, and the most
    registers of a thread."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = MAX_REGISTERS


def kernel_config(
    *, rows: int, key_size: int, value_size: int, element_bytes: int, cache_bytes: int, capability: tuple[int, int]
) -> KernelConfig:
    """Return the configuration for tiles of at most `rows` rows (tokens times query heads per KV head) on a compute capability.

    `key_size` and `value_size` are numbers of a head.
    """
    block_m = max(MIN_DOT_ROWS, next_power_of_two(rows))
    widest = max(key_size, value_size)
    # rows that are widened take registers twice, and a head that is computed as two tiles (`attend.py`) has two such rows
    is_widened = cache_bytes < element_bytes
    has_two_widened = is_widened and next_power_of_two(widest) != widest
    # On GPUs other than Hopper, products read keys and values from registers, twice as often if a head is computed as two tiles.
    is_tight = capability != HOPPER and block_m > MIN_DOT_ROWS and 64 < widest < 128
    if element_bytes > 2:  # float32: products without tensor cores, for exactness, not for speed
        # at width 80 more warps spill registers, at width 512 fewer
        num_warps = 4 if block_m > MIN_DOT_ROWS and 64 < widest < 96 else 8 if widest <= 256 else 16
        return KernelConfig(block_m=block_m, block_n=MIN_DOT_ROWS, num_warps=num_warps, num_stages=1)
    if block_m <= 32:  # decoding is memory-bound: keep several loads in flight
        fitting = DECODE_ROUND_BYTES // (2 * widest * cache_bytes)
        block_n = min(32 if is_widened else 64, max(MIN_DOT_ROWS, next_power_of_two(fitting + 1) // 2))
        # larger accumulators need the registers of 8 warps, and so do wide rows that are widened
        is_large = block_m * widest * element_bytes > 32 * 256 or (is_widened and widest > 192)
        num_warps, stages = 8 if is_large else 4, DECODE_STAGES
        if block_n * 2 * widest * cache_bytes > DECODE_ROUND_BYTES:
            stages = LONG_PIPELINE_STAGES
        if widest > 512:  # MLA's rows of 576; devices with 99 KiB of shared memory are among the others
            stages = DECODE_STAGES if capability in ((8, 0), HOPPER) else 3
        if has_two_widened:
            block_n, stages = 16, 3
        is_plain = capability == HOPPER and block_m == MIN_DOT_ROWS and not is_widened and widest in (64, 128)
        shape = {"block_m": block_m, "block_n": block_n, "num_warps": num_warps, "num_stages": stages}
        return KernelConfig(**shape, max_registers=DECODE_REGISTERS if is_plain else MAX_REGISTERS)
    small = widest * element_bytes <= 256 and not has_two_widened
    block_n, num_stages = (64, 3) if small else (32, 2)
    # Only 9.0 is meant: later capabilities may have less shared memory (12.x has 99 KiB), and another vendor's devices report 9.4.
    if capability == HOPPER:
        is_long = block_n * (key_size + value_size) * element_bytes <= LONG_PIPELINE_ROUND_BYTES
    else:
        is_long = small and widest > 64 and not is_widened
        is_tight |= capability[0] != 10 and 64 < widest <= 128
        num_stages = 1 if 128 < widest < 256 else num_stages  # more take registers that are not there
        block_n = 16 if is_tight else 32 if is_long or is_widened else block_n
    if is_long:
        num_stages = LONG_PIPELINE_STAGES
    return KernelConfig(block_m=block_m, block_n=block_n, num_warps=8, num_stages=num_stages)


def tilings(
    *, group: int, kv_heads: int, key_size: int, element_bytes: int, cache_bytes: int, multiprocessors: int
) -> tuple[Tiling, ...]:
    """Return the tilings of sequences with one, a few, and many new tokens, if `group` query heads share each of the KV heads.

    Each of the three has its own launch, so that a sequence's result does not depend on the rest of the batch.
    """
    tokens = max(1, _prompt_rows(key_size * element_bytes, element_bytes, cache_bytes) // group)
    unit = max(MIN_DOT_ROWS, SPLIT_UNIT_BYTES // (2 * key_size * cache_bytes))
    unit = 1 << (unit.bit_length() - 1)  # a power of two
    splits = {"split_unit": unit, "kv_heads": kv_heads, "multiprocessors": multiprocessors}
    return (
        Tiling(min_new_tokens=1, max_new_tokens=1, tile_tokens=1, **splits),
        Tiling(min_new_tokens=2, max_new_tokens=FEW_TOKENS, tile_tokens=min(FEW_TOKENS, tokens), **splits),
        Tiling(min_new_tokens=FEW_TOKENS + 1, max_new_tokens=NO_LIMIT, tile_tokens=tokens, **splits),
    )


def _prompt_rows(row_bytes: int, element_bytes: int, cache_bytes: int) -> int:
    """Return the rows of a prompt's tile: fewer if queries are wide or keys are widened, since both take registers."""
    if element_bytes > 2:
        return MIN_DOT_ROWS
    is_wide, is_widened = row_bytes > 384, cache_bytes < 2
    if row_bytes > 512 or (is_wide and is_widened):
        return PROMPT_ROWS // 4
    return PROMPT_ROWS // 2 if is_wide or is_widened else PROMPT_ROWS

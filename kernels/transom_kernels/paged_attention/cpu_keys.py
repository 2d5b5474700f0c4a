"""What the CPU kernels of `paged_attention` read per sequence: the mask rule (`rule.py`) and the addresses of keys and values."""

from __future__ import annotations

from numba import njit

from transom_kernels.cpu.simd import load_i32, load_i64, store_i64
from transom_kernels.cpu.work import argument
from transom_kernels.paged_attention.cpu_arguments import (
    BLOCK_SIZE,
    BLOCK_TABLE,
    CHUNK,
    COLUMNS,
    FIRST_BLOCK,
    K_BLOCK,
    K_CACHE,
    K_HEAD,
    K_TOKEN,
    NUM_SINK_BLOCKS,
    V_BLOCK,
    V_CACHE,
    V_HEAD,
    V_TOKEN,
    WINDOW,
)

MASKED = -3e38  # the score of a key that is not seen
NO_MAXIMUM = -1e30  # the maximum of no scores: above MASKED, so that a masked score weighs 0 and no NaN comes up


@njit
def first_key(arguments, position, attend_from):
    """`MaskRule.first_key`."""
    low, window, chunk = attend_from, argument(arguments, WINDOW), argument(arguments, CHUNK)
    if window > 0:
        low = max(low, position - window + 1)
    if chunk > 0:
        low = max(low, position - position % chunk)
    return low


@njit
def write_addresses(arguments, sequence, kv_head, begin, end, keys, values):
    """Write the addresses of the keys and values of tokens [begin, end) into two arrays.

    A block that the table lacks reads as block 0; the host has checked that there is none where it knows the numbers.
    """
    size, columns = argument(arguments, BLOCK_SIZE), argument(arguments, COLUMNS)
    num_sink_blocks = argument(arguments, NUM_SINK_BLOCKS)
    table = argument(arguments, BLOCK_TABLE) + 4 * sequence * columns
    shift = num_sink_blocks - load_i32(argument(arguments, FIRST_BLOCK) + 4 * sequence)
    k_base = argument(arguments, K_CACHE) + kv_head * argument(arguments, K_HEAD)
    v_base = argument(arguments, V_CACHE) + kv_head * argument(arguments, V_HEAD)
    k_token, v_token = argument(arguments, K_TOKEN), argument(arguments, V_TOKEN)
    logical = begin // size
    offset = begin - logical * size
    left = end - begin
    while left > 0:
        column = logical if logical < num_sink_blocks else logical + shift
        block = max(0, load_i32(table + 4 * min(max(column, 0), columns - 1)))
        count = min(size - offset, left)
        k = k_base + block * argument(arguments, K_BLOCK) + offset * k_token
        v = v_base + block * argument(arguments, V_BLOCK) + offset * v_token
        for i in range(count):
            store_i64(keys + 8 * i, k + i * k_token)
            store_i64(values + 8 * i, v + i * v_token)
        keys, values = keys + 8 * count, values + 8 * count
        left -= count
        offset = 0
        logical += 1


@njit
def fill_addresses(keys, values, count, address):
    """Write one address `count` times into both arrays."""
    for i in range(count):
        store_i64(keys + 8 * i, address)
        store_i64(values + 8 * i, address)


@njit
def repeat_last(addresses, count, padded):
    """Copy the last of `count` addresses behind it, up to `padded`."""
    last = load_i64(addresses + 8 * (count - 1))
    for i in range(count, padded):
        store_i64(addresses + 8 * i, last)

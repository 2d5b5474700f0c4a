"""What the CPU kernels of `paged_attention` read per sequence: the mask rule (`rule.py`) and the addresses of keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from transom_kernels.cpu.simd import load_f32, load_i32, load_scalar_f32, splat, store_f32, store_i64, store_scalar_f32
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
    K_SCALE,
    K_TOKEN,
    KS_BLOCK,
    KS_HEAD,
    KS_TOKEN,
    NUM_SINK_BLOCKS,
    V_BLOCK,
    V_CACHE,
    V_HEAD,
    V_SCALE,
    V_TOKEN,
    VS_BLOCK,
    VS_HEAD,
    VS_TOKEN,
    WINDOW,
)
from transom_kernels.paged_attention.cpu_inner_loops import make_move_row
from transom_kernels.quantised_kv.cpu_rows import row_bytes

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
def table_block(table, logical, shift, num_sink_blocks, columns):
    """The physical block of a logical block.

    A block that the table lacks reads as block 0; the host has checked that there is none where it knows the numbers.
    """
    column = logical if logical < num_sink_blocks else logical + shift
    return max(0, load_i32(table + 4 * min(max(column, 0), columns - 1)))


@njit
def write_addresses(arguments, scratch, sequence, kv_head, begin, end, keys, values):
    """Write the addresses of the keys and values of tokens [begin, end) into two arrays."""
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
        block = table_block(table, logical, shift, num_sink_blocks, columns)
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
def copy_floats(source, stride, to, count):
    """Copy `count` float32 numbers that lie `stride` bytes apart."""
    done = 0
    if stride == 4:
        while done + 16 <= count:
            store_f32(to + 4 * done, load_f32(source + 4 * done))
            done += 16
    for i in range(done, count):
        store_scalar_f32(to + 4 * i, load_scalar_f32(source + i * stride))


@njit
def write_scales(arguments, scratch, sequence, kv_head, begin, end, keys, values):
    """Write the scales of the keys and values of tokens [begin, end) into two arrays."""
    size, columns = argument(arguments, BLOCK_SIZE), argument(arguments, COLUMNS)
    num_sink_blocks = argument(arguments, NUM_SINK_BLOCKS)
    table = argument(arguments, BLOCK_TABLE) + 4 * sequence * columns
    shift = num_sink_blocks - load_i32(argument(arguments, FIRST_BLOCK) + 4 * sequence)
    k_base = argument(arguments, K_SCALE) + kv_head * argument(arguments, KS_HEAD)
    v_base = argument(arguments, V_SCALE) + kv_head * argument(arguments, VS_HEAD)
    k_token, v_token = argument(arguments, KS_TOKEN), argument(arguments, VS_TOKEN)
    logical = begin // size
    offset = begin - logical * size
    left = end - begin
    while left > 0:
        block = table_block(table, logical, shift, num_sink_blocks, columns)
        count = min(size - offset, left)
        copy_floats(k_base + block * argument(arguments, KS_BLOCK) + offset * k_token, k_token, keys, count)
        copy_floats(v_base + block * argument(arguments, VS_BLOCK) + offset * v_token, v_token, values, count)
        keys, values = keys + 4 * count, values + 4 * count
        left -= count
        offset = 0
        logical += 1


@njit
def clear_floats(at, count):
    """Set `count` float32 numbers, a multiple of 16, to 0."""
    for i in range(0, count, 16):
        store_f32(at + 4 * i, splat(np.float32(0.0)))


def make_find_groups(key_copies: int, value_copies: int, stored: str, width: int, value_width: int) -> Any:
    """find_groups(arguments, scratch, sequence, kv_head, begin, end, keys, values): the addresses of groups of 16 keys and values.

    A group begins at a multiple of 16. It is read where it lies, if all of its keys are in [begin, end) and their rows lie one
    behind the other; else its rows are copied to the offsets `key_copies` and `value_copies` of scratch, with zeros for other keys.
    """
    key_bytes, value_bytes = row_bytes(stored, width), row_bytes(stored, value_width)
    move_key, move_value = make_move_row(stored, width), make_move_row(stored, value_width)

    @njit
    def clear(at, num_bytes):
        for offset in range(0, num_bytes, 64):
            store_f32(at + offset, splat(np.float32(0.0)))

    @njit
    def find_groups(arguments, scratch, sequence, kv_head, begin, end, keys, values):
        size, columns = argument(arguments, BLOCK_SIZE), argument(arguments, COLUMNS)
        num_sink_blocks = argument(arguments, NUM_SINK_BLOCKS)
        table = argument(arguments, BLOCK_TABLE) + 4 * sequence * columns
        shift = num_sink_blocks - load_i32(argument(arguments, FIRST_BLOCK) + 4 * sequence)
        k_base = argument(arguments, K_CACHE) + kv_head * argument(arguments, K_HEAD)
        v_base = argument(arguments, V_CACHE) + kv_head * argument(arguments, V_HEAD)
        k_block, v_block = argument(arguments, K_BLOCK), argument(arguments, V_BLOCK)
        k_token, v_token = argument(arguments, K_TOKEN), argument(arguments, V_TOKEN)
        is_dense = k_token == key_bytes and v_token == value_bytes
        first = begin // 16 * 16
        logical = first // size
        offset = first - logical * size
        block = table_block(table, logical, shift, num_sink_blocks, columns)
        k_copy, v_copy = scratch + key_copies, scratch + value_copies
        for key in range(first, end, 16):
            if is_dense and key >= begin and key + 16 <= end and offset + 16 <= size:
                store_i64(keys, k_base + block * k_block + offset * k_token)
                store_i64(values, v_base + block * v_block + offset * v_token)
                offset += 16
                if offset == size and key + 16 < end:
                    logical, offset = logical + 1, 0
                    block = table_block(table, logical, shift, num_sink_blocks, columns)
            else:
                store_i64(keys, k_copy)
                store_i64(values, v_copy)
                clear(k_copy, 16 * key_bytes)
                clear(v_copy, 16 * value_bytes)
                for t in range(16):
                    if offset == size:
                        logical, offset = logical + 1, 0
                    if begin <= key + t < end:
                        block = table_block(table, logical, shift, num_sink_blocks, columns)
                        move_key(k_base + block * k_block + offset * k_token, k_copy + t * key_bytes)
                        move_value(v_base + block * v_block + offset * v_token, v_copy + t * value_bytes)
                    offset += 1
                if offset == size:
                    logical, offset = logical + 1, 0
                if key + 16 < end:
                    block = table_block(table, logical, shift, num_sink_blocks, columns)
                k_copy += 16 * key_bytes
                v_copy += 16 * value_bytes
            keys, values = keys + 8, values + 8

    return find_groups

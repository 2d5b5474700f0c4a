"""What the CPU kernels of `policy_attention` read of a compact block table: ranges of visible keys, and the keys' addresses.

Keys are counted in two ways. A *table index* is a key's place in the table (column * P + offset). The keys of a row's run are cut
into units by their *aligned index* = table index + shift, where the shift makes the row's own key have its position: so a row
whose run has no gap is cut where `paged_attention` would cut it, however many blocks have left the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from transom_kernels.cpu.simd import load_i32, load_i64, splat, store_f32, store_i64
from transom_kernels.cpu.work import argument
from transom_kernels.paged_attention.cpu_arguments import (
    BLOCK_SIZE,
    BLOCK_TABLE,
    COLUMNS,
    K_BLOCK,
    K_CACHE,
    K_HEAD,
    K_SCALE,
    K_TOKEN,
    KS_BLOCK,
    KS_HEAD,
    KS_TOKEN,
    QUERY_OFFSET,
    START,
    V_BLOCK,
    V_CACHE,
    V_HEAD,
    V_SCALE,
    V_TOKEN,
    VS_BLOCK,
    VS_HEAD,
    VS_TOKEN,
)
from transom_kernels.paged_attention.cpu_inner_loops import make_move_row
from transom_kernels.paged_attention.cpu_keys import copy_floats
from transom_kernels.policy_attention.cpu_arguments import KEY_BLOCKS, NUM_COLUMNS, SINK_Q, SINKS, WINDOWS
from transom_kernels.quantised_kv.cpu_rows import row_bytes


@njit
def row_position(arguments, sequence, row):
    """The position of a query row."""
    start = load_i32(argument(arguments, START) + 4 * sequence)
    return start + row - load_i32(argument(arguments, QUERY_OFFSET) + 4 * sequence)


@njit
def table_index(arguments, sequence, key):
    """The table index of the first key of the table that is at least `key`; the end of the table if there is none."""
    size = argument(arguments, BLOCK_SIZE)
    blocks = argument(arguments, KEY_BLOCKS) + 4 * sequence * argument(arguments, COLUMNS)
    count = load_i32(argument(arguments, NUM_COLUMNS) + 4 * sequence)
    logical, low, high = key // size, 0, count
    while low < high:
        middle = (low + high) // 2
        if load_i32(blocks + 4 * middle) < logical:
            low = middle + 1
        else:
            high = middle
    if low < count and load_i32(blocks + 4 * low) == logical:
        return low * size + key - logical * size
    return low * size


@njit
def visible_ranges(arguments, sequence, position):
    """(sinks_end, run_begin, run_end): the row sees the table indices [0, sinks_end) and [run_begin, run_end).

    Where there is a second query, the first range has all sink tokens, which it is for; else only those before the run.
    """
    window = load_i32(argument(arguments, WINDOWS) + 4 * sequence)
    sinks = load_i32(argument(arguments, SINKS) + 4 * sequence)
    run_end = table_index(arguments, sequence, position + 1)
    run_begin = table_index(arguments, sequence, max(0, position - window + 1)) if window > 0 else 0
    sinks_end = table_index(arguments, sequence, min(sinks, position + 1))
    if argument(arguments, SINK_Q) == 0:
        sinks_end = min(sinks_end, run_begin)
    return sinks_end, max(run_begin, sinks_end), run_end


def make_find_groups(
    shift_at: int, key_copies: int, value_copies: int, stored: str, width: int, value_width: int
) -> Any:
    """find_groups(arguments, memory, sequence, kv_head, begin, end, keys, values), as `paged_attention.cpu_keys` makes it.

    The keys [begin, end) are counted by aligned index; the shift lies at the offset `shift_at` of the thread's memory.
    """
    key_bytes, value_bytes = row_bytes(stored, width), row_bytes(stored, value_width)
    move_key, move_value = make_move_row(stored, width), make_move_row(stored, value_width)

    @njit
    def clear(at, num_bytes):
        for offset in range(0, num_bytes, 64):
            store_f32(at + offset, splat(np.float32(0.0)))

    @njit
    def find_groups(arguments, memory, sequence, kv_head, begin, end, keys, values):
        size, shift = argument(arguments, BLOCK_SIZE), load_i64(memory + shift_at)
        table = argument(arguments, BLOCK_TABLE) + 4 * sequence * argument(arguments, COLUMNS)
        k_base = argument(arguments, K_CACHE) + kv_head * argument(arguments, K_HEAD)
        v_base = argument(arguments, V_CACHE) + kv_head * argument(arguments, V_HEAD)
        k_block, v_block = argument(arguments, K_BLOCK), argument(arguments, V_BLOCK)
        k_token, v_token = argument(arguments, K_TOKEN), argument(arguments, V_TOKEN)
        is_dense = k_token == key_bytes and v_token == value_bytes
        k_copy, v_copy = memory + key_copies, memory + value_copies
        for first in range(begin // 16 * 16, end, 16):
            index = first - shift
            offset = index % size
            if is_dense and first >= begin and first + 16 <= end and offset + 16 <= size:
                block = load_i32(table + 4 * (index // size))
                store_i64(keys, k_base + block * k_block + offset * k_token)
                store_i64(values, v_base + block * v_block + offset * v_token)
            else:
                store_i64(keys, k_copy)
                store_i64(values, v_copy)
                clear(k_copy, 16 * key_bytes)
                clear(v_copy, 16 * value_bytes)
                for t in range(max(0, begin - first), min(16, end - first)):
                    block, offset = load_i32(table + 4 * ((index + t) // size)), (index + t) % size
                    move_key(k_base + block * k_block + offset * k_token, k_copy + t * key_bytes)
                    move_value(v_base + block * v_block + offset * v_token, v_copy + t * value_bytes)
                k_copy += 16 * key_bytes
                v_copy += 16 * value_bytes
            keys, values = keys + 8, values + 8

    return find_groups


def make_write_addresses(shift_at: int) -> Any:
    """write_addresses(arguments, memory, sequence, kv_head, begin, end, keys, values), as in `paged_attention.cpu_keys`.

    The keys [begin, end) are counted by aligned index, as `make_find_groups` counts them.
    """

    @njit
    def write_addresses(arguments, memory, sequence, kv_head, begin, end, keys, values):
        size, shift = argument(arguments, BLOCK_SIZE), load_i64(memory + shift_at)
        table = argument(arguments, BLOCK_TABLE) + 4 * sequence * argument(arguments, COLUMNS)
        k_base = argument(arguments, K_CACHE) + kv_head * argument(arguments, K_HEAD)
        v_base = argument(arguments, V_CACHE) + kv_head * argument(arguments, V_HEAD)
        k_token, v_token = argument(arguments, K_TOKEN), argument(arguments, V_TOKEN)
        index = begin - shift
        while index < end - shift:
            offset = index % size
            block, count = load_i32(table + 4 * (index // size)), min(size - offset, end - shift - index)
            k = k_base + block * argument(arguments, K_BLOCK) + offset * k_token
            v = v_base + block * argument(arguments, V_BLOCK) + offset * v_token
            for i in range(count):
                store_i64(keys + 8 * i, k + i * k_token)
                store_i64(values + 8 * i, v + i * v_token)
            keys, values = keys + 8 * count, values + 8 * count
            index += count

    return write_addresses


def make_write_scales(shift_at: int) -> Any:
    """write_scales(arguments, memory, sequence, kv_head, begin, end, keys, values), as in `paged_attention.cpu_keys`.

    The keys [begin, end) are counted by aligned index, as `make_find_groups` counts them.
    """

    @njit
    def write_scales(arguments, memory, sequence, kv_head, begin, end, keys, values):
        size, shift = argument(arguments, BLOCK_SIZE), load_i64(memory + shift_at)
        table = argument(arguments, BLOCK_TABLE) + 4 * sequence * argument(arguments, COLUMNS)
        k_base = argument(arguments, K_SCALE) + kv_head * argument(arguments, KS_HEAD)
        v_base = argument(arguments, V_SCALE) + kv_head * argument(arguments, VS_HEAD)
        k_token, v_token = argument(arguments, KS_TOKEN), argument(arguments, VS_TOKEN)
        index = begin - shift
        while index < end - shift:
            offset = index % size
            block, count = load_i32(table + 4 * (index // size)), min(size - offset, end - shift - index)
            copy_floats(k_base + block * argument(arguments, KS_BLOCK) + offset * k_token, k_token, keys, count)
            copy_floats(v_base + block * argument(arguments, VS_BLOCK) + offset * v_token, v_token, values, count)
            keys, values = keys + 4 * count, values + 4 * count
            index += count

    return write_scales

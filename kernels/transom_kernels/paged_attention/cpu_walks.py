"""Walks over the keys of a sequence for CPU kernels: they write arrays of the addresses and scales of keys and values.

Each kind of block table has two functions for them, a `TableReader`: `cpu_keys.TABLE` of ordinary tables, and what
`policy_attention.cpu_table.make_table` makes of compact ones.

Legend: P block size in tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from transom_kernels.cpu.simd import load_f32, load_scalar_f32, splat, store_f32, store_i64, store_scalar_f32
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu_arguments import (
    BLOCK_SIZE,
    K_BLOCK,
    K_CACHE,
    K_HEAD,
    K_SCALE,
    K_TOKEN,
    KS_BLOCK,
    KS_HEAD,
    KS_TOKEN,
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
from transom_kernels.quantised_kv.cpu_rows import row_bytes


class TableReader(NamedTuple):
    """How walks read a kind of block table. The keys of a sequence are adjacent by their index.

    - index_of(scratch, key): the index of a key; `index // P` is the number of its block, `index % P` its place there.
    - block_at(arguments, sequence, number): the id of a block in the cache.
    """

    index_of: Any
    block_at: Any


@helper
def fill_addresses(keys, values, count, address):
    """Write one address `count` times into both arrays."""
    for i in range(count):
        store_i64(keys + 8 * i, address)
        store_i64(values + 8 * i, address)


@helper
def clear_floats(at, count):
    """Set `count` float32 numbers, a multiple of 16, to 0."""
    for i in range(0, count, 16):
        store_f32(at + 4 * i, splat(np.float32(0.0)))


@helper
def copy_floats(source, stride, to, count):
    """Copy `count` float32 numbers that lie `stride` bytes apart."""
    done = 0
    if stride == 4:
        while done + 16 <= count:
            store_f32(to + 4 * done, load_f32(source + 4 * done))
            done += 16
    for i in range(done, count):
        store_scalar_f32(to + 4 * i, load_scalar_f32(source + i * stride))


@helper
def key_address(arguments, kv_head, block, offset):
    """The address of the key at `offset` of a block."""
    place = block * argument(arguments, K_BLOCK) + offset * argument(arguments, K_TOKEN)
    return argument(arguments, K_CACHE) + kv_head * argument(arguments, K_HEAD) + place


@helper
def value_address(arguments, kv_head, block, offset):
    """The address of the value at `offset` of a block."""
    place = block * argument(arguments, V_BLOCK) + offset * argument(arguments, V_TOKEN)
    return argument(arguments, V_CACHE) + kv_head * argument(arguments, V_HEAD) + place


@helper
def write_block_addresses(arguments, kv_head, block, offset, count, keys, values):
    """Write the addresses of `count` keys and values of a block, from `offset` on."""
    k, v = key_address(arguments, kv_head, block, offset), value_address(arguments, kv_head, block, offset)
    k_token, v_token = argument(arguments, K_TOKEN), argument(arguments, V_TOKEN)
    for i in range(count):
        store_i64(keys + 8 * i, k + i * k_token)
        store_i64(values + 8 * i, v + i * v_token)


@helper
def write_block_scales(arguments, kv_head, block, offset, count, keys, values):
    """Write the scales of `count` keys and values of a block, from `offset` on."""
    k_token, v_token = argument(arguments, KS_TOKEN), argument(arguments, VS_TOKEN)
    k = argument(arguments, K_SCALE) + kv_head * argument(arguments, KS_HEAD) + block * argument(arguments, KS_BLOCK)
    v = argument(arguments, V_SCALE) + kv_head * argument(arguments, VS_HEAD) + block * argument(arguments, VS_BLOCK)
    copy_floats(k + offset * k_token, k_token, keys, count)
    copy_floats(v + offset * v_token, v_token, values, count)


def _make_walk(table: TableReader, write_block: Any, element_bytes: int) -> Any:
    """walk(arguments, scratch, sequence, kv_head, begin, end, keys, values): `write_block` for each block of the keys [begin, end).

    The arrays `keys` and `values` have an element of `element_bytes` bytes for each key.
    """
    index_of, block_at = table

    @helper
    def walk(arguments, scratch, sequence, kv_head, begin, end, keys, values):
        size, index = argument(arguments, BLOCK_SIZE), index_of(scratch, begin)
        number = index // size
        offset = index - number * size
        left = end - begin
        while left > 0:
            count = min(size - offset, left)
            block = block_at(arguments, sequence, number)
            write_block(arguments, kv_head, block, offset, count, keys, values)
            keys, values = keys + element_bytes * count, values + element_bytes * count
            left -= count
            number, offset = number + 1, 0

    return walk


def make_write_addresses(table: TableReader) -> Any:
    """write_addresses(arguments, scratch, sequence, kv_head, begin, end, keys, values): int64 addresses."""
    return _make_walk(table, write_block_addresses, 8)


def make_write_scales(table: TableReader) -> Any:
    """write_scales(arguments, scratch, sequence, kv_head, begin, end, keys, values): float32 scales."""
    return _make_walk(table, write_block_scales, 4)


def make_find_groups(
    table: TableReader, key_copies: int, value_copies: int, stored: str, width: int, value_width: int
) -> Any:
    """find_groups(arguments, scratch, sequence, kv_head, begin, end, keys, values): the addresses of groups of 16 keys and values.

    A group begins at a multiple of 16. It is read where it lies, if all of its keys are in [begin, end) and their rows lie one
    behind the other; else its rows are copied to the offsets `key_copies` and `value_copies` of scratch, with zeros for other keys.
    """
    index_of, block_at = table
    key_bytes, value_bytes = row_bytes(stored, width), row_bytes(stored, value_width)
    move_key, move_value = make_move_row(stored, width), make_move_row(stored, value_width)

    @helper
    def copy_group(arguments, sequence, kv_head, index, first, last, k_copy, v_copy):
        """Copy the keys `first` to `last` - 1 of the group of 16 that begins at an index."""
        size = argument(arguments, BLOCK_SIZE)
        clear_floats(k_copy, 4 * key_bytes)
        clear_floats(v_copy, 4 * value_bytes)
        for t in range(first, last):
            number = (index + t) // size
            block, offset = block_at(arguments, sequence, number), index + t - number * size
            move_key(key_address(arguments, kv_head, block, offset), k_copy + t * key_bytes)
            move_value(value_address(arguments, kv_head, block, offset), v_copy + t * value_bytes)

    @helper
    def find_groups(arguments, scratch, sequence, kv_head, begin, end, keys, values):
        size, first = argument(arguments, BLOCK_SIZE), begin // 16 * 16
        is_dense = argument(arguments, K_TOKEN) == key_bytes and argument(arguments, V_TOKEN) == value_bytes
        k_copy, v_copy = scratch + key_copies, scratch + value_copies
        index = index_of(scratch, first)
        number = index // size
        offset = index - number * size
        for key in range(first, end, 16):
            if is_dense and key >= begin and key + 16 <= end and offset + 16 <= size:
                block = block_at(arguments, sequence, number)
                store_i64(keys, key_address(arguments, kv_head, block, offset))
                store_i64(values, value_address(arguments, kv_head, block, offset))
            else:
                store_i64(keys, k_copy)
                store_i64(values, v_copy)
                index, last = number * size + offset, min(16, end - key)
                copy_group(arguments, sequence, kv_head, index, max(0, begin - key), last, k_copy, v_copy)
                k_copy += 16 * key_bytes
                v_copy += 16 * value_bytes
            keys, values = keys + 8, values + 8
            offset += 16
            while offset >= size:
                number, offset = number + 1, offset - size

    return find_groups

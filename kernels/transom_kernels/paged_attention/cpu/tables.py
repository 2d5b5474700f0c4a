"""Reads block tables in CPU kernels: which keys a query row sees, and where they and their values are stored.

A `TableReader` reads one kind of block table. *Walks* over the keys of a sequence write arrays of the addresses and scales of keys
and values.

Legend: B sequences, N table columns, P block size in tokens.
"""

from typing import Any, NamedTuple

import numpy as np

from transom_kernels.cpu.simd import load_f32, load_i32, load_scalar_f32, splat, store_f32, store_i64, store_scalar_f32
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu.layout import AT, PAGED, UNIT_KEYS, AttentionKind
from transom_kernels.paged_attention.cpu.row_vectors import make_move_row
from transom_kernels.quantised_kv.cpu_rows import cache_address, row_bytes


class TableReader(NamedTuple):
    """Functions that read one kind of block table. Ordinary tables number keys by their positions, compact tables by their aligned
    indices (`policy_attention.cpu.kernel`).

    - visible(arguments, sequence, position) -> (sinks_end, run_begin, shift): the row at `position` sees the keys [0, sinks_end)
      (sink tokens) and [run_begin, position + 1) (the run).
    - set_shift(memory, shift): the caller calls it before it reads keys: with 0 for sink tokens, with `shift` for the run.
    - index_of(memory, key): the index of a key; `index // P` is the number of its block, `index % P` its place in the block.
    - block_at(arguments, sequence, number): the id in the cache of the block with this number.
    """

    visible: Any
    set_shift: Any
    index_of: Any
    block_at: Any


@helper
def first_key(arguments, sequence, position):
    """Return the first key, sink tokens aside, that the row at `position` sees, as `rule.MaskRule.first_key`."""
    low = load_i32(argument(arguments, PAGED.attend_from) + 4 * sequence)
    window, chunk = argument(arguments, PAGED.window), argument(arguments, PAGED.chunk)
    if window > 0:
        low = max(low, position - window + 1)
    if chunk > 0:
        low = max(low, position - position % chunk)
    return low


@helper
def _visible(arguments, sequence, position):
    low = first_key(arguments, sequence, position)
    return min(argument(arguments, PAGED.num_sink_tokens), position + 1, low), low, 0


@helper
def _set_shift(memory, shift):
    """Do nothing: in ordinary tables the index of a key is its position."""


@helper
def _index_of(memory, key):
    return key


@helper
def _block_at(arguments, sequence, number):
    """Return a block's id, or block 0 if the table lacks it: with tables on the host, `launcher._check_blocks` has checked that."""
    columns, num_sink_blocks = argument(arguments, AT.columns), argument(arguments, PAGED.num_sink_blocks)
    shift = num_sink_blocks - load_i32(argument(arguments, PAGED.first_block) + 4 * sequence)
    column = min(max(number if number < num_sink_blocks else number + shift, 0), columns - 1)
    return max(0, load_i32(argument(arguments, AT.block_table) + 4 * (sequence * columns + column)))


TABLE = TableReader(_visible, _set_shift, _index_of, _block_at)


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
def write_block_addresses(arguments, kv_head, block, offset, count, keys, values):
    """Write the addresses of `count` keys and values of a block, from `offset` on."""
    k = cache_address(arguments, AT.keys, block, offset, kv_head)
    v = cache_address(arguments, AT.values, block, offset, kv_head)
    k_token, v_token = argument(arguments, AT.keys.token), argument(arguments, AT.values.token)
    for i in range(count):
        store_i64(keys + 8 * i, k + i * k_token)
        store_i64(values + 8 * i, v + i * v_token)


@helper
def write_block_scales(arguments, kv_head, block, offset, count, keys, values):
    """Write the scales of `count` keys and values of a block, from `offset` on."""
    k = cache_address(arguments, AT.key_scales, block, offset, kv_head)
    v = cache_address(arguments, AT.value_scales, block, offset, kv_head)
    copy_floats(k, argument(arguments, AT.key_scales.token), keys, count)
    copy_floats(v, argument(arguments, AT.value_scales.token), values, count)


def _make_walk(table: TableReader, write_block: Any, element_bytes: int) -> Any:
    """Build walk(arguments, memory, sequence, kv_head, begin, end, keys, values): it calls `write_block` for each block of the keys
    [begin, end). The arrays `keys` and `values` have `element_bytes` bytes for each key.
    """
    index_of, block_at = table.index_of, table.block_at

    @helper
    def walk(arguments, memory, sequence, kv_head, begin, end, keys, values):
        size, index = argument(arguments, AT.block_size), index_of(memory, begin)
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
    """Build write_addresses(arguments, memory, sequence, kv_head, begin, end, keys, values), which writes int64 addresses."""
    return _make_walk(table, write_block_addresses, 8)


def make_write_scales(table: TableReader) -> Any:
    """Build write_scales(arguments, memory, sequence, kv_head, begin, end, keys, values), which writes float32 scales."""
    return _make_walk(table, write_block_scales, 4)


def make_find_groups(kind: AttentionKind, table: TableReader, key_copies: int, value_copies: int) -> Any:
    """Build find_groups(arguments, memory, sequence, kv_head, begin, end, keys, values): it writes the addresses of groups.

    A group is 16 keys (or their values) that begin at a multiple of 16. It is read in the cache if all of its keys are in
    [begin, end) and their rows are adjacent. Otherwise its rows are copied to the offsets `key_copies` and `value_copies` of the
    memory, with zeros for keys outside [begin, end).
    """
    index_of, block_at = table.index_of, table.block_at
    widths = (kind.width, kind.value_width)
    key_bytes, value_bytes = (row_bytes(kind.stored, width) for width in widths)
    move_key, move_value = (make_move_row(kind.stored, width) for width in widths)

    @helper
    def copy_group(arguments, sequence, kv_head, index, first, last, k_copy, v_copy):
        """Copy the keys [first, last) of the group of 16 that begins at an index."""
        size = argument(arguments, AT.block_size)
        clear_floats(k_copy, 4 * key_bytes)
        clear_floats(v_copy, 4 * value_bytes)
        for t in range(first, last):
            number = (index + t) // size
            block, offset = block_at(arguments, sequence, number), index + t - number * size
            move_key(cache_address(arguments, AT.keys, block, offset, kv_head), k_copy + t * key_bytes)
            move_value(cache_address(arguments, AT.values, block, offset, kv_head), v_copy + t * value_bytes)

    @helper
    def find_groups(arguments, memory, sequence, kv_head, begin, end, keys, values):
        size, first = argument(arguments, AT.block_size), begin // 16 * 16
        is_dense = (
            argument(arguments, AT.keys.token) == key_bytes and argument(arguments, AT.values.token) == value_bytes
        )
        k_copy, v_copy = memory + key_copies, memory + value_copies
        index = index_of(memory, first)
        number = index // size
        offset = index - number * size
        for key in range(first, end, 16):
            if is_dense and key >= begin and key + 16 <= end and offset + 16 <= size:
                block = block_at(arguments, sequence, number)
                store_i64(keys, cache_address(arguments, AT.keys, block, offset, kv_head))
                store_i64(values, cache_address(arguments, AT.values, block, offset, kv_head))
            else:
                store_i64(keys, k_copy)
                store_i64(values, v_copy)
                index, last = number * size + offset, min(16, end - key)
                copy_group(arguments, sequence, kv_head, index, max(0, begin - key), last, k_copy, v_copy)
                k_copy += 16 * key_bytes
                v_copy += 16 * value_bytes
            keys, values = keys + 8, values + 8
            offset += 16
            while offset >= size:  # several times if blocks are smaller than a group
                number, offset = number + 1, offset - size

    return find_groups


def make_next_groups(table: TableReader) -> Any:
    """Build next_groups(arguments, memory, sequence, kv_head, begin, end, keys), which writes the addresses of a unit's groups, to
    prefetch them: UNIT_KEYS // 16 addresses of the keys [begin, end), of which the last repeats. No row is copied."""
    index_of, block_at = table.index_of, table.block_at

    @helper
    def next_groups(arguments, memory, sequence, kv_head, begin, end, keys):
        size, first = argument(arguments, AT.block_size), begin // 16 * 16
        for at in range(0, UNIT_KEYS, 16):
            index = index_of(memory, max(begin, min(first + at, end - 1)))
            number = index // size
            block, offset = block_at(arguments, sequence, number), index - number * size
            store_i64(keys + at // 2, cache_address(arguments, AT.keys, block, offset, kv_head))

    return next_groups

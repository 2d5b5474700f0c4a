"""The CPU kernel of `latent_attention`: an item is some heads of one query, computed like a decoding row of `paged_attention`.

A query's rows are listed first, without those that are absent; then units of 256 rows of the list are attended to and merged.

Legend: D latent width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from transom_kernels.cpu.simd import NUM_BYTES, load_i64, splat, store_f32, store_i64
from transom_kernels.cpu.work import argument, claim, finish, scratch
from transom_kernels.latent_attention.cpu_arguments import (
    BLOCK_ROWS,
    BLOCK_STRIDE,
    CACHE,
    NUM_SLOTS,
    PLACE_WORDS,
    QUERIES,
    QUERY_HEAD,
    QUERY_ROW,
    ROW_STRIDE,
    SLOT_ROW,
    SLOTS,
)
from transom_kernels.paged_attention.cpu_arguments import KV_HEADS
from transom_kernels.paged_attention.cpu_decode import make_results, make_units
from transom_kernels.paged_attention.cpu_inner_loops import make_copy_row, make_move_row
from transom_kernels.paged_attention.cpu_layout import UNIT_KEYS, DecodeLayout, words_of


def make_attend(dtype: str, heads: int, width: int) -> Any:
    """Arguments: see `cpu_arguments`. Items: queries times groups of `heads` heads."""
    layout, row_bytes = DecodeLayout(dtype, heads, width, width), width * NUM_BYTES[dtype]
    queries_at, query_stride = layout.queries, layout.query_stride
    partial_at, total_at, copies_at, list_at = layout.partial, layout.total, layout.key_copies, layout.num_bytes
    copy_row, move_row = make_copy_row(words_of(dtype), width), make_move_row(dtype, width)

    @njit
    def list_rows(arguments, memory, query):
        """Write the addresses of the rows that a query sees; return their number."""
        count = 0
        for place in range(2):
            words = arguments + 8 * PLACE_WORDS * place
            slots = argument(words, SLOTS) + query * argument(words, SLOT_ROW)
            for i in range(argument(words, NUM_SLOTS)):
                slot = load_i64(slots + 8 * i)
                if slot >= 0:
                    block, row = slot // argument(words, BLOCK_ROWS), slot % argument(words, BLOCK_ROWS)
                    offset = block * argument(words, BLOCK_STRIDE) + row * argument(words, ROW_STRIDE)
                    store_i64(memory + list_at + 8 * count, argument(words, CACHE) + offset)
                    count += 1
        return count

    @njit
    def find_groups(arguments, memory, query, head_group, begin, end, keys, values):
        """The addresses of groups of 16 rows of the list: where they lie if they are adjacent, else copies."""
        copy = memory + copies_at
        for first in range(begin, end, 16):
            rows = memory + list_at + 8 * first
            group = load_i64(rows)
            is_dense = first + 16 <= end
            for t in range(1, min(16, end - first)):
                is_dense = is_dense and load_i64(rows + 8 * t) == group + t * row_bytes
            if not is_dense:
                group = copy
                for at in range(0, 16 * row_bytes, 64):
                    store_f32(copy + at, splat(np.float32(0.0)))
                for t in range(min(16, end - first)):
                    move_row(load_i64(rows + 8 * t), copy + t * row_bytes)
                copy += 16 * row_bytes
            store_i64(keys, group)
            store_i64(values, group)
            keys, values = keys + 8, values + 8

    attend_unit = make_units(heads, width, width, dtype, False, find_groups)
    merge, clear, store_result = make_results(heads, width, dtype, "f32")

    @njit
    def attend_query(arguments, memory, query, head_group):
        """Some heads of one query."""
        head_stride = argument(arguments, QUERY_HEAD)
        q = argument(arguments, QUERIES) + query * argument(arguments, QUERY_ROW) + head_group * heads * head_stride
        for head in range(heads):
            copy_row(q + head * head_stride, memory + queries_at + head * query_stride)
        count = list_rows(arguments, memory, query)
        total, partial = memory + total_at, memory + partial_at
        if count == 0:
            clear(total)
        for begin in range(0, count, UNIT_KEYS):
            end = min(begin + UNIT_KEYS, count)
            attend_unit(arguments, memory, query, head_group, begin, end, partial if begin > 0 else total)
            if begin > 0:
                merge(total, partial)
        store_result(arguments, query, head_group, total)

    def attend(arguments, thread):
        item = claim(thread)
        while item >= 0:
            head_groups = argument(arguments, KV_HEADS)
            attend_query(arguments, scratch(thread), item // head_groups, item % head_groups)
            finish(thread)
            item = claim(thread)

    return attend

"""The CPU kernel of `latent_attention`: an item is some heads of one query, computed like a decoding row of `paged_attention`.

    out[t, h] = softmax over rows r of (scale * q[t, h] . r, sink_logits[h]) times r       rows of the window, then entries

A query's rows are listed first, without those that are absent; then units of 256 rows of the list are attended to and merged.

Legend: D latent width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from transom_kernels.cpu.simd import NUM_BYTES, load_i64, splat, store_f32, store_i64
from transom_kernels.cpu.work import argument, claim, finish, helper, scratch
from transom_kernels.latent_attention.cpu import LATENT
from transom_kernels.paged_attention.cpu.arguments import RESULT
from transom_kernels.paged_attention.cpu.layout import UNIT_KEYS, AttentionKind, decode_layout
from transom_kernels.paged_attention.cpu.partial_results import make_partial_results
from transom_kernels.paged_attention.cpu.row_vectors import make_copy_row, make_move_row
from transom_kernels.paged_attention.cpu.units import make_attend_unit


def make_attend(**parameters: Any) -> Any:
    """The kernel; the parameters are the fields of `AttentionKind`. Items: queries times groups of `group` heads."""
    kind = AttentionKind(**parameters)
    layout, heads, row_bytes = decode_layout(kind), kind.group, kind.width * NUM_BYTES[kind.dtype]
    list_at = layout.num_bytes  # addresses of the query's rows
    copy_row, move_row = make_copy_row(kind.words, kind.width), make_move_row(kind.dtype, kind.width)
    zero = np.float32(0.0)

    @helper
    def list_rows(arguments, rows, memory, query, count):
        """Write the addresses of a query's rows of the window or entries after `count` others; return their number together."""
        slots = argument(arguments, rows.slots) + query * argument(arguments, rows.slot_row)
        size = argument(arguments, rows.block_rows)
        for i in range(argument(arguments, rows.num_slots)):
            slot = load_i64(slots + 8 * i)
            if slot >= 0:
                offset = slot // size * argument(arguments, rows.block) + slot % size * argument(arguments, rows.row)
                store_i64(memory + list_at + 8 * count, argument(arguments, rows.cache) + offset)
                count += 1
        return count

    @helper
    def find_groups(arguments, memory, query, head_group, begin, end, keys, values):
        """The addresses of groups of 16 rows of the list: in the cache if they are adjacent there, else copies."""
        copy = memory + layout.key_copies
        for first in range(begin, end, 16):
            rows = memory + list_at + 8 * first
            group = load_i64(rows)
            is_dense = first + 16 <= end
            for t in range(1, min(16, end - first)):
                is_dense = is_dense and load_i64(rows + 8 * t) == group + t * row_bytes
            if not is_dense:
                group = copy
                for at in range(0, 16 * row_bytes, 64):
                    store_f32(copy + at, splat(zero))
                for t in range(min(16, end - first)):
                    move_row(load_i64(rows + 8 * t), copy + t * row_bytes)
                copy += 16 * row_bytes
            store_i64(keys, group)
            store_i64(values, group)
            keys, values = keys + 8, values + 8

    attend_unit = make_attend_unit(kind, find_groups)
    merge, clear, store = make_partial_results(kind)

    @helper
    def attend_query(arguments, memory, query, head_group):
        """Some heads of one query."""
        head_stride = argument(arguments, LATENT.q_head)
        q = argument(arguments, LATENT.q) + query * argument(arguments, LATENT.q_row) + head_group * heads * head_stride
        for head in range(heads):
            copy_row(q + head * head_stride, memory + layout.queries + head * layout.query_stride)
        count = list_rows(arguments, LATENT.window, memory, query, 0)
        count = list_rows(arguments, LATENT.entries, memory, query, count)
        total, partial = memory + layout.total, memory + layout.partial
        if count == 0:
            clear(total)
        for begin in range(0, count, UNIT_KEYS):
            end = min(begin + UNIT_KEYS, count)
            attend_unit(arguments, memory, query, head_group, begin, end, partial if begin > 0 else total)
            if begin > 0:
                merge(total, partial)
        store(arguments, query, head_group, total)

    def attend(arguments, thread):
        item = claim(thread)
        while item >= 0:
            head_groups = argument(arguments, RESULT.kv_heads)
            attend_query(arguments, scratch(thread), item // head_groups, item % head_groups)
            finish(thread)
            item = claim(thread)

    return attend

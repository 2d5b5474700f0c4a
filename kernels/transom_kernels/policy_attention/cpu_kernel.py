"""The CPU kernels of `policy_attention`: `attend`, `combine` and `add_mass`. `cpu.py` launches them.

Prompts are computed in tiles (`cpu_prompt.py`), other rows like decoding rows of `paged_attention`: units of 256 keys with a
partial result each, merged in the order of the keys; slots share a row. Units begin at multiples of 256 of the aligned index
(`cpu_table.py`).

Items of `attend`: tiles of prompts times KV heads, then slots times KV heads times decoding rows. Items of `combine`: KV heads
times decoding rows. Items of `add_mass`: units of the table times sequences.

Legend: G query heads per KV head, D key width, Dv value width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from transom_kernels.cpu.simd import (
    LOG2_E,
    exp2,
    float_of_bits,
    load_f32,
    load_i32,
    load_scalar_f32,
    splat,
    store_f32,
    store_i64,
    store_scalar_f32,
    tanh,
)
from transom_kernels.cpu.work import argument, claim, finish, scratch
from transom_kernels.paged_attention.cpu_arguments import (
    BLOCK_SIZE,
    COLUMNS,
    DECODING,
    KV_HEADS,
    MAX_UNITS,
    NUM_SLOTS,
    NUM_TILE_ITEMS,
    PARTIALS,
    Q_HEAD,
    Q_ROW,
    QUERY_OFFSET,
    SCALE,
    SOFT_CAP,
    TILES,
    Q,
)
from transom_kernels.paged_attention.cpu_decode import make_results, make_units
from transom_kernels.paged_attention.cpu_inner_loops import (
    keep_visible,
    make_copy_row,
    make_group_scores,
)
from transom_kernels.paged_attention.cpu_keys import MASKED
from transom_kernels.paged_attention.cpu_layout import UNIT_KEYS, DecodeLayout, is_quantised, words_of
from transom_kernels.paged_attention.cpu_walks import clear_floats, make_find_groups, make_write_scales
from transom_kernels.policy_attention.cpu_arguments import (
    MASS,
    MASS_UNITS,
    NUM_COLUMNS,
    ROW_SEQUENCE,
    SINK_Q,
    STATISTICS,
)
from transom_kernels.policy_attention.cpu_prompt import make_prompt
from transom_kernels.policy_attention.cpu_statistics import make_store_statistics
from transom_kernels.policy_attention.cpu_table import make_table, row_position, visible_ranges

EXTRA_BYTES = 64 + 4 * UNIT_KEYS  # of a thread's memory behind `DecodeLayout`: the shift, and the sums of `add_mass`


@njit
def count_units(sinks_end, run_begin, run_end, shift):
    """Units of the sink tokens, and units of the run."""
    run = (run_end - 1 + shift) // UNIT_KEYS + 1 - (run_begin + shift) // UNIT_KEYS if run_begin < run_end else 0
    return (sinks_end + UNIT_KEYS - 1) // UNIT_KEYS, run


def make_load_queries(dtype: str, group: int, width: int, value_width: int) -> Any:
    """load_queries(arguments, memory, row, kv_head, tensor): copy a row's queries of a KV head out of argument `tensor`."""
    layout = DecodeLayout(dtype, group, width, value_width)
    queries_at, query_stride = layout.queries, layout.query_stride
    copy_row = make_copy_row(words_of(dtype), width)

    @njit
    def load_queries(arguments, memory, row, kv_head, tensor):
        head_stride = argument(arguments, Q_HEAD)
        q = argument(arguments, tensor) + row * argument(arguments, Q_ROW) + kv_head * group * head_stride
        for g in range(group):
            copy_row(q + g * head_stride, memory + queries_at + g * query_stride)

    return load_queries


def make_store_row(group: int, value_width: int, dtype: str, sink_dtype: str | None, store_result: Any) -> Any:
    """store_row(arguments, row, kv_head, total): the result of a row's query heads, and their statistics."""
    layout = DecodeLayout(dtype, group, 1, value_width)
    partial_stride, statistics = layout.partial_stride, layout.statistics
    store_statistics = make_store_statistics(sink_dtype)

    @njit
    def store_row(arguments, row, kv_head, total):
        store_result(arguments, row, kv_head, total)
        for g in range(group):
            of = total + g * partial_stride + statistics
            top, weight_sum = load_scalar_f32(of), load_scalar_f32(of + 4)
            store_statistics(
                arguments, row, kv_head * group + g, top, weight_sum, argument(arguments, KV_HEADS) * group
            )

    return store_row


def make_attend(
    dtype: str,
    stored: str,
    group: int,
    width: int,
    value_width: int,
    has_soft_cap: bool,
    sink_dtype: str | None,
) -> Any:
    """Arguments: see `cpu_arguments`."""
    layout = DecodeLayout(dtype, group, width, value_width)
    shift_at = layout.num_bytes
    partial_at, total_at, partial_bytes = layout.partial, layout.total, layout.partial_bytes
    table = make_table(shift_at)
    find_groups = make_find_groups(table, layout.key_copies, layout.value_copies, stored, width, value_width)
    write_scales = make_write_scales(table)
    attend_unit = make_units(group, width, value_width, dtype, has_soft_cap, find_groups, stored, write_scales)
    merge, clear, store_result = make_results(group, value_width, dtype, sink_dtype)
    load_queries = make_load_queries(dtype, group, width, value_width)
    store_row = make_store_row(group, value_width, dtype, sink_dtype, store_result)
    attend_tile = make_prompt(group, width, value_width, dtype, has_soft_cap, sink_dtype, stored)

    @njit
    def attend_row(arguments, memory, row, kv_head, slot):
        """One query row. Slot s of S takes the units s, s + S, ..."""
        sequence = load_i32(argument(arguments, ROW_SEQUENCE) + 4 * row)
        position = row_position(arguments, sequence, row)
        sinks_end, run_begin, run_end = visible_ranges(arguments, sequence, position)
        shift = position + 1 - run_end
        num_sink_units, num_run_units = count_units(sinks_end, run_begin, run_end, shift)
        num_units, num_slots = num_sink_units + num_run_units, argument(arguments, NUM_SLOTS)
        shared = num_slots > 1 and num_units > 1
        if slot > 0 and (slot >= num_units or not shared):
            return
        partials = argument(arguments, PARTIALS)
        partials += (row * argument(arguments, KV_HEADS) + kv_head) * argument(arguments, MAX_UNITS) * partial_bytes
        total, partial = memory + total_at, memory + partial_at
        if num_units == 0:
            clear(total)
        loaded = 0  # the argument whose queries are in memory
        for unit in range(slot, num_units, num_slots if shared else 1):
            if unit < num_sink_units:
                begin, end = unit * UNIT_KEYS, min((unit + 1) * UNIT_KEYS, sinks_end)
                store_i64(memory + shift_at, 0)
                wanted = SINK_Q if argument(arguments, SINK_Q) else Q
            else:
                number = (run_begin + shift) // UNIT_KEYS + unit - num_sink_units
                begin, end = max(run_begin + shift, number * UNIT_KEYS), min((number + 1) * UNIT_KEYS, run_end + shift)
                store_i64(memory + shift_at, shift)
                wanted = Q
            if loaded != wanted + 1:
                load_queries(arguments, memory, row, kv_head, wanted)
                loaded = wanted + 1
            to = partials + unit * partial_bytes if shared else (partial if unit > 0 else total)
            attend_unit(arguments, memory, sequence, kv_head, begin, end, to)
            if not shared and unit > 0:
                merge(total, partial)
        if not shared:
            store_row(arguments, row, kv_head, total)

    def attend(arguments, thread):
        item = claim(thread)
        while item >= 0:
            kv_heads, num_slots = argument(arguments, KV_HEADS), argument(arguments, NUM_SLOTS)
            num_tile_items, decoding = argument(arguments, NUM_TILE_ITEMS), argument(arguments, DECODING)
            if item < num_tile_items:
                tile = argument(arguments, TILES) + 8 * (item // kv_heads)
                attend_tile(arguments, scratch(thread), load_i32(tile), load_i32(tile + 4), item % kv_heads)
            else:
                slot, rest = (item - num_tile_items) % num_slots, (item - num_tile_items) // num_slots
                row = rest // kv_heads
                if decoding:
                    row = load_i32(decoding + 4 * row)
                attend_row(arguments, scratch(thread), row, rest % kv_heads, slot)
            finish(thread)
            item = claim(thread)

    return attend


def make_combine(
    dtype: str,
    stored: str,
    group: int,
    width: int,
    value_width: int,
    has_soft_cap: bool,
    sink_dtype: str | None,
) -> Any:
    """Merges the partial results of rows that slots shared. Arguments: see `cpu_arguments`."""
    partial_bytes = DecodeLayout(dtype, group, width, value_width).partial_bytes
    merge, _, store_result = make_results(group, value_width, dtype, sink_dtype)
    store_row = make_store_row(group, value_width, dtype, sink_dtype, store_result)

    @njit
    def combine_row(arguments, row, kv_head):
        sequence = load_i32(argument(arguments, ROW_SEQUENCE) + 4 * row)
        position = row_position(arguments, sequence, row)
        sinks_end, run_begin, run_end = visible_ranges(arguments, sequence, position)
        num_sink_units, num_run_units = count_units(sinks_end, run_begin, run_end, position + 1 - run_end)
        if num_sink_units + num_run_units > 1:
            partials = argument(arguments, PARTIALS)
            partials += (row * argument(arguments, KV_HEADS) + kv_head) * argument(arguments, MAX_UNITS) * partial_bytes
            for unit in range(1, num_sink_units + num_run_units):
                merge(partials, partials + unit * partial_bytes)
            store_row(arguments, row, kv_head, partials)

    def combine(arguments, thread):
        item = claim(thread)
        while item >= 0:
            kv_heads, decoding = argument(arguments, KV_HEADS), argument(arguments, DECODING)
            row = item // kv_heads
            if decoding:
                row = load_i32(decoding + 4 * row)
            combine_row(arguments, row, item % kv_heads)
            finish(thread)
            item = claim(thread)

    return combine


def make_add_mass(dtype: str, stored: str, group: int, width: int, has_soft_cap: bool) -> Any:
    """Adds attention probabilities by block. An item is a unit of 256 table indices of one sequence."""
    words, layout = words_of(dtype, stored), DecodeLayout(dtype, group, width, width)
    has_scales, key_scales_at, value_scales_at = is_quantised(dtype, stored), layout.key_scales, layout.value_scales
    shift_at, sums_at = layout.num_bytes, layout.num_bytes + 64
    keys_at, values_at, scores_at = layout.key_groups, layout.value_groups, layout.scores
    queries_at, score_stride = layout.queries, layout.score_stride
    table = make_table(shift_at)
    find_groups = make_find_groups(table, layout.key_copies, layout.value_copies, stored, width, width)
    write_scales = make_write_scales(table)
    group_scores = make_group_scores(words, group, width, width, (layout.query_stride, score_stride))
    load_queries = make_load_queries(dtype, group, width, width)
    masked, log2_e, zero, one = np.float32(MASKED), np.float32(LOG2_E), np.float32(0.0), np.float32(1.0)

    @njit
    def add_head(scores, key_scales, sums, begin, end, top, inverse, factor, soft_cap):
        """Add one head's probabilities of the keys [begin, end) to the sums."""
        first = begin // 16 * 16
        for key in range(first, end, 16):
            x = load_f32(scores + 4 * (key - first)) * splat(factor)
            if has_scales:
                x = x * load_f32(key_scales + 4 * (key - first))
            if has_soft_cap:
                x = tanh(x) * splat(soft_cap * log2_e)
            x = keep_visible(x, key, begin, end - 1, key, masked)
            at = sums + 4 * (key - first // UNIT_KEYS * UNIT_KEYS)
            store_f32(at, load_f32(at) + exp2(x - splat(top)) * splat(inverse))

    @njit
    def add_range(arguments, memory, sequence, row, kv_head, begin, end, tensor):
        """Add what a row's heads see of the table indices [begin, end), with the queries of an argument."""
        if begin >= end:
            return
        load_queries(arguments, memory, row, kv_head, tensor)
        keys, values = memory + keys_at, memory + values_at
        find_groups(arguments, memory, sequence, kv_head, begin, end, keys, values)
        num_groups = (end - begin // 16 * 16 + 15) // 16
        key_scales, value_scales = memory + key_scales_at, memory + value_scales_at
        if has_scales:
            clear_floats(key_scales, 16 * num_groups)
            at = 4 * (begin - begin // 16 * 16)
            write_scales(arguments, memory, sequence, kv_head, begin, end, key_scales + at, value_scales + at)
        group_scores(keys, values, num_groups, memory + queries_at, memory + scores_at)
        scale, soft_cap = float_of_bits(argument(arguments, SCALE)), float_of_bits(argument(arguments, SOFT_CAP))
        factor = scale / soft_cap if has_soft_cap else scale * log2_e
        statistics = argument(arguments, STATISTICS)
        statistics += 8 * (row * argument(arguments, KV_HEADS) + kv_head) * group
        for g in range(group):
            top, weight_sum = load_scalar_f32(statistics + 8 * g), load_scalar_f32(statistics + 8 * g + 4)
            inverse = one / weight_sum if weight_sum > zero else zero
            scores = memory + scores_at + g * score_stride
            add_head(scores, key_scales, memory + sums_at, begin, end, top, inverse, factor, soft_cap)

    @njit
    def add_unit(arguments, memory, sequence, unit):
        size, columns = argument(arguments, BLOCK_SIZE), argument(arguments, COLUMNS)
        unit_begin, unit_end = unit * UNIT_KEYS, (unit + 1) * UNIT_KEYS
        num_indices = load_i32(argument(arguments, NUM_COLUMNS) + 4 * sequence) * size
        for at in range(0, 4 * UNIT_KEYS, 64):
            store_f32(memory + sums_at + at, splat(zero))
        store_i64(memory + shift_at, 0)
        sink_tensor = SINK_Q if argument(arguments, SINK_Q) else Q
        offsets = argument(arguments, QUERY_OFFSET) + 4 * sequence
        if unit_begin >= num_indices:
            return
        for row in range(load_i32(offsets), load_i32(offsets + 4)):
            sinks_end, run_begin, run_end = visible_ranges(arguments, sequence, row_position(arguments, sequence, row))
            for kv_head in range(argument(arguments, KV_HEADS)):
                end = min(unit_end, sinks_end)
                add_range(arguments, memory, sequence, row, kv_head, unit_begin, end, sink_tensor)
                begin, end = max(unit_begin, run_begin), min(unit_end, run_end)
                add_range(arguments, memory, sequence, row, kv_head, begin, end, Q)
        for index in range(unit_begin, min(unit_end, num_indices)):
            at = argument(arguments, MASS) + 4 * (sequence * columns + index // size)
            store_scalar_f32(at, load_scalar_f32(at) + load_scalar_f32(memory + sums_at + 4 * (index - unit_begin)))

    def add_mass(arguments, thread):
        item = claim(thread)
        while item >= 0:
            units = argument(arguments, MASS_UNITS)
            add_unit(arguments, scratch(thread), item // units, item % units)
            finish(thread)
            item = claim(thread)

    return add_mass

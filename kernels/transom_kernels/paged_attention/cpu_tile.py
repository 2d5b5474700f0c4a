"""A tile of query tokens of a prompt and one KV head, with online softmax over tiles of keys, for CPU kernels.

Key tiles begin at multiples of KEY_TILE, whatever the query tile, and keys that a row does not see weigh exactly 0: so a row does
not depend on the rows beside it. A key tile is packed once for all rows of the query tile (keys as columns of words, values as rows
of words); keys that no row sees are packed as zeros, because their slots may hold NaN.

A *row* is one query head of one token; the rows of a tile are ordered by token, then by head. SUB_ROWS rows are computed together:
the scores of a key tile, their weights, the weighted values. Products use tile registers (AMX) where the processor has them.

Legend: G query heads per KV head, D key width, Dv value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from transom_kernels.cpu.simd import (
    LOG2_E,
    NUM_BYTES,
    exp2,
    float_of_bits,
    fma,
    lane_max,
    lane_sum,
    load_f32,
    load_i64,
    load_scalar_f32,
    splat,
    store_bf16,
    store_f32,
    store_scalar_f32,
    tanh,
    vector_max,
    weight_bf16,
    weight_f32,
)
from transom_kernels.cpu.tiles import configure_tiles, release_tiles
from transom_kernels.cpu.work import argument
from transom_kernels.paged_attention.cpu_arguments import KV_HEADS, OUT, Q_HEAD, Q_ROW, SCALE, SOFT_CAP
from transom_kernels.paged_attention.cpu_inner_loops import (
    keep_visible,
    make_copy_row,
    make_pack_keys,
    make_pack_values,
)
from transom_kernels.paged_attention.cpu_keys import MASKED, NO_MAXIMUM
from transom_kernels.paged_attention.cpu_layout import (
    KEY_TILE,
    SUB_ROWS,
    PromptLayout,
    is_quantised,
    uses_tiles,
    words_of,
)
from transom_kernels.paged_attention.cpu_products import make_multiply_keys, make_multiply_values
from transom_kernels.paged_attention.cpu_row_result import make_store_row
from transom_kernels.paged_attention.cpu_walks import (
    TableReader,
    clear_floats,
    fill_addresses,
    make_write_addresses,
    make_write_scales,
)


class TileLoops(NamedTuple):
    """What `make_tile` makes.

    - begin_tile(scratch): begin the results of a tile's rows.
    - load_queries(arguments, scratch, row, kv_head, tokens, tensor): copy the queries of `tokens` tokens from query row `row` on,
      out of argument `tensor`.
    - attend_keys(arguments, scratch, sequence, kv_head, tokens, low, sinks_end, end): add what the rows see of the keys below
      `sinks_end` and of [low, end). Token t sees key k if k <= high[t], and k >= low[t] or k < sinks_end, where low and high are
      int64 arrays at the layout's `low_keys` and `high_keys`, both ascending.
    - store_rows(arguments, scratch, row, kv_head, num_rows): store the results.
    """

    begin_tile: Any
    load_queries: Any
    attend_keys: Any
    store_rows: Any


def make_tile(
    group: int,
    width: int,
    value_width: int,
    dtype: str,
    has_soft_cap: bool,
    sink_dtype: str | None,
    stored: str | None,
    table: TableReader,
) -> TileLoops:
    """The loops of a tile. `table` reads the block table."""
    words, cached = words_of(dtype), words_of(dtype, stored)
    layout = PromptLayout(dtype, group, width, value_width)
    low_keys_at, high_keys_at = layout.low_keys, layout.high_keys
    queries_at, outputs_at, sums_at, maxima_at = layout.queries, layout.outputs, layout.sums, layout.maxima
    scores_at, weights_at, zeros_at = layout.scores, layout.weights, layout.zeros
    key_addresses_at, value_addresses_at = layout.key_addresses, layout.value_addresses
    has_scales, key_scales_at, value_scales_at = is_quantised(dtype, stored), layout.key_scales, layout.value_scales
    keys_at, values_at, tiles_at = layout.keys, layout.values, layout.tile_registers
    key_panel, value_panel = layout.key_panel, layout.value_panel
    tile_rows, zeros_bytes = layout.rows, layout.zeros_bytes
    query_stride, value_stride, weight_stride = layout.query_stride, layout.value_stride, layout.weight_stride
    score_stride, weight_bytes = layout.score_stride, layout.weight_bytes
    elements, element_bytes = words.elements, NUM_BYTES[dtype]
    multiply_keys = make_multiply_keys(dtype, group, width, value_width)
    multiply_values = make_multiply_values(dtype, group, width, value_width)
    has_tiles = uses_tiles(dtype)
    copy_row = make_copy_row(words, width)
    pack_keys = make_pack_keys(cached, width)
    pack_values = make_pack_values(cached, value_width, value_panel)
    store_weights, weight_of = (store_bf16, weight_bf16) if words.pairs else (store_f32, weight_f32)
    store_row = make_store_row(value_width, dtype, sink_dtype)
    write_addresses, write_scales = make_write_addresses(table), make_write_scales(table)
    masked, no_maximum, log2_e = np.float32(MASKED), np.float32(NO_MAXIMUM), np.float32(LOG2_E)
    zero = np.float32(0.0)

    @njit
    def begin_tile(scratch):
        """Begin the results of the tile's rows; queries that it lacks are zeros."""
        for at in range(queries_at, queries_at + tile_rows * query_stride, 64):
            store_f32(scratch + at, splat(zero))
        for at in range(outputs_at, outputs_at + tile_rows * value_stride, 64):
            store_f32(scratch + at, splat(zero))
        for row in range(tile_rows):
            store_f32(scratch + sums_at + row * 64, splat(zero))
            store_scalar_f32(scratch + maxima_at + 4 * row, no_maximum)
        for at in range(zeros_at, zeros_at + zeros_bytes, 64):
            store_f32(scratch + at, splat(zero))

    @njit
    def load_queries(arguments, scratch, row, kv_head, tokens, tensor):
        """Copy the tile's queries."""
        head_stride = argument(arguments, Q_HEAD)
        q = argument(arguments, tensor) + row * argument(arguments, Q_ROW) + kv_head * group * head_stride
        for token in range(tokens):
            for g in range(group):
                copy_row(q + g * head_stride, scratch + queries_at + (token * group + g) * query_stride)
            q += argument(arguments, Q_ROW)

    @njit
    def pack_tile(arguments, scratch, sequence, kv_head, begin, low, sinks_end, end):
        """Pack the keys [begin, begin + KEY_TILE) and their values: those below `end` that are sinks or at least `low`."""
        keys, values = scratch + key_addresses_at, scratch + value_addresses_at
        end = min(begin + KEY_TILE, end)
        fill_addresses(keys, values, KEY_TILE, scratch + zeros_at)
        run = max(begin, low)
        sinks = min(sinks_end, end, run)
        if begin < sinks:
            write_addresses(arguments, scratch, sequence, kv_head, begin, sinks, keys, values)
        if run < end:
            skipped = 8 * (run - begin)
            write_addresses(arguments, scratch, sequence, kv_head, run, end, keys + skipped, values + skipped)
        if has_scales:
            key_scales, value_scales = scratch + key_scales_at, scratch + value_scales_at
            clear_floats(key_scales, KEY_TILE)
            clear_floats(value_scales, KEY_TILE)
            if begin < sinks:
                write_scales(arguments, scratch, sequence, kv_head, begin, sinks, key_scales, value_scales)
            if run < end:
                skipped = 4 * (run - begin)
                write_scales(
                    arguments, scratch, sequence, kv_head, run, end, key_scales + skipped, value_scales + skipped
                )
        for key in range(0, end - begin, 32):
            pack_keys(keys + 8 * key, scratch + keys_at + key // 16 * key_panel)
            pack_keys(keys + 8 * key + 128, scratch + keys_at + (key // 16 + 1) * key_panel)
            for pair in range(key, key + 32, 2):
                pack_values(values + 8 * pair, scratch + values_at + pair // elements * 64)

    @njit
    def scale_row(scores, num_keys, key_scales):
        """Multiply scores by the scales of their keys."""
        for k in range(0, num_keys, 16):
            store_f32(scores + 4 * k, load_f32(scores + 4 * k) * load_f32(key_scales + 4 * k))

    @njit
    def softmax_row(scores, weights, sums, maximum, output, num_keys, factor, value_scales):
        """Weights of one row's scores, which are multiplied by `factor`; rescale what was summed before to the new maximum."""
        top = splat(masked)
        for k in range(0, num_keys, 16):
            top = vector_max(top, load_f32(scores + 4 * k))
        old = load_scalar_f32(maximum)
        new = max(old, lane_max(top) * factor)
        rescale, factors, minus_new = exp2(splat(old - new)), splat(factor), splat(-new)
        total = load_f32(sums) * rescale
        for k in range(0, num_keys, 16):
            weight = weight_of(fma(load_f32(scores + 4 * k), factors, minus_new))
            total = total + weight
            if has_scales:
                weight = weight * load_f32(value_scales + 4 * k)
            store_weights(weights + weight_bytes * k, weight)
        store_f32(sums, total)
        store_scalar_f32(maximum, new)
        if old != new:
            for at in range(0, value_stride, 64):
                store_f32(output + at, load_f32(output + at) * rescale)

    @njit
    def cap_row(scores, num_keys, scale, cap):
        """soft_cap * tanh(score * scale / soft_cap)"""
        for k in range(0, num_keys, 16):
            store_f32(scores + 4 * k, tanh(load_f32(scores + 4 * k) * splat(scale / cap)) * splat(cap))

    @njit
    def mask_row(scores, num_keys, begin, low, high, sinks_end):
        """Overwrite the scores of keys that the row does not see."""
        for k in range(0, num_keys, 16):
            store_f32(scores + 4 * k, keep_visible(load_f32(scores + 4 * k), begin + k, low, high, sinks_end, masked))

    @njit
    def attend_rows(arguments, scratch, row, tokens, begin, sinks_end):
        """SUB_ROWS rows of the query tile and one tile of packed keys."""
        first, last = row // group, min((row + SUB_ROWS - 1) // group, tokens - 1)
        lows, highs = scratch + low_keys_at, scratch + high_keys_at
        num_keys = min(KEY_TILE, (load_i64(highs + 8 * last) - begin + 32) // 32 * 32)
        if num_keys <= 0 or (load_i64(lows + 8 * first) >= begin + KEY_TILE and sinks_end <= begin):
            return
        multiply_keys(scratch, row, num_keys)
        end = begin + num_keys
        is_masked = end - 1 > load_i64(highs + 8 * first) or (load_i64(lows + 8 * last) > begin and sinks_end < end)
        scale, cap = float_of_bits(argument(arguments, SCALE)), float_of_bits(argument(arguments, SOFT_CAP))
        factor = log2_e if has_soft_cap else scale * log2_e
        for r in range(SUB_ROWS):
            token, scores = min((row + r) // group, tokens - 1), scratch + scores_at + r * score_stride
            if has_scales:
                scale_row(scores, num_keys, scratch + key_scales_at)
            if has_soft_cap:
                cap_row(scores, num_keys, scale, cap)
            if is_masked:
                mask_row(scores, num_keys, begin, load_i64(lows + 8 * token), load_i64(highs + 8 * token), sinks_end)
            softmax_row(
                scores,
                scratch + weights_at + r * weight_stride,
                scratch + sums_at + (row + r) * 64,
                scratch + maxima_at + (row + r) * 4,
                scratch + outputs_at + (row + r) * value_stride,
                num_keys,
                factor,
                scratch + value_scales_at,
            )
        multiply_values(scratch, row, num_keys)

    @njit
    def attend_keys(arguments, scratch, sequence, kv_head, tokens, low, sinks_end, end):
        """Loop over the tiles of keys that some row sees."""
        if has_tiles:
            configure_tiles(scratch + tiles_at, 16)
        begin = 0
        while begin < end:
            if begin >= sinks_end:
                begin = max(begin, low // KEY_TILE * KEY_TILE)
            if begin < end:
                pack_tile(arguments, scratch, sequence, kv_head, begin, low, sinks_end, end)
                for sub_row in range(0, tokens * group, SUB_ROWS):
                    attend_rows(arguments, scratch, sub_row, tokens, begin, sinks_end)
            begin += KEY_TILE
        if has_tiles:
            release_tiles()

    @njit
    def store_rows(arguments, scratch, row, kv_head, num_rows):
        """Store the results of the tile's rows."""
        heads = argument(arguments, KV_HEADS) * group
        for r in range(num_rows):
            head = kv_head * group + r % group
            out = argument(arguments, OUT) + ((row + r // group) * heads + head) * value_width * element_bytes
            top, total = load_scalar_f32(scratch + maxima_at + 4 * r), lane_sum(load_f32(scratch + sums_at + 64 * r))
            store_row(arguments, head, top, total, scratch + outputs_at + r * value_stride, out)

    return TileLoops(begin_tile, load_queries, attend_keys, store_rows)

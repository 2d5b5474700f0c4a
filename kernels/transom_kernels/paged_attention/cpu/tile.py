"""Computes a tile on CPUs: attention of query tokens of a prompt for one KV head, with an online softmax over tiles of keys.

Key tiles begin at multiples of KEY_TILE for every query tile, and keys that a row does not see weigh exactly 0, so a row's result
does not depend on other rows. A key tile is packed once for all rows of the query tile: keys as columns, values as rows of words
(`layout.Words`: a float32, or a pair of bfloat16). Keys that no row sees are packed as zeros, because their slots may hold NaN.

A *row* is one query head of one token; the rows of a tile are ordered by token, then by head. SUB_ROWS rows are computed together:
the scores of a key tile, their weights, the weighted values. Products use AMX tile registers if the processor has them.

Legend: G query heads per KV head, D key width, Dv value width.
"""

from typing import Any, NamedTuple

import numpy as np

from transom_kernels.cpu.simd import (
    LOG2_E,
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
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu.layout import (
    AT,
    KEY_TILE,
    MASKED,
    NO_MAXIMUM,
    RESULT,
    SUB_ROWS,
    AttentionKind,
    prompt_layout,
)
from transom_kernels.paged_attention.cpu.products import (
    make_multiply_keys,
    make_multiply_values,
    make_pack_keys,
    make_pack_values,
)
from transom_kernels.paged_attention.cpu.row_results import make_store_row
from transom_kernels.paged_attention.cpu.row_vectors import keep_visible, make_copy_row
from transom_kernels.paged_attention.cpu.tables import (
    TableReader,
    clear_floats,
    fill_addresses,
    make_write_addresses,
    make_write_scales,
)


class TileLoops(NamedTuple):
    """The functions that compute a tile. The caller calls them in this order, the middle two again for other queries and keys.

    - begin_tile(memory): clear the results of the tile's rows.
    - load_queries(arguments, memory, row, kv_head, tokens, tensor): copy the queries of `tokens` tokens, from query row `row` on,
      out of the argument whose word is number `tensor`.
    - attend_keys(arguments, memory, sequence, kv_head, tokens, low, sinks_end, end): attend to the keys [0, sinks_end) and
      [low, end). Token t sees key k if k <= high[t] and (k >= low[t] or k < sinks_end); low and high are int64 arrays at the
      layout's `low_keys` and `high_keys`, which the caller has filled in ascending order.
    - store_rows(arguments, memory, row, kv_head, num_rows): divide by the softmax sums and store the results.
    """

    begin_tile: Any
    load_queries: Any
    attend_keys: Any
    store_rows: Any


def make_tile(kind: AttentionKind, table: TableReader) -> TileLoops:
    """Build the functions of a tile. `table` reads the block table."""
    words, cached, layout, group = kind.words, kind.cached, prompt_layout(kind), kind.group
    has_scales, has_soft_cap, has_tiles, elements = kind.has_scales, kind.has_soft_cap, kind.uses_tiles, words.elements
    multiply_keys, multiply_values = make_multiply_keys(kind), make_multiply_values(kind)
    copy_row = make_copy_row(words, kind.width)
    pack_keys = make_pack_keys(cached, kind.width)
    pack_values = make_pack_values(cached, kind.value_width, layout.value_panel)
    store_weights, weight_of = (store_bf16, weight_bf16) if words.pairs else (store_f32, weight_f32)
    store_row = make_store_row(kind)
    write_addresses, write_scales = make_write_addresses(table), make_write_scales(table)
    masked, no_maximum, log2_e = np.float32(MASKED), np.float32(NO_MAXIMUM), np.float32(LOG2_E)
    zero = np.float32(0.0)

    @helper
    def begin_tile(memory):
        """Clear the results of the tile's rows, and their queries: a tile with fewer tokens has zeros for the others."""
        for at in range(layout.queries, layout.queries + layout.rows * layout.query_stride, 64):
            store_f32(memory + at, splat(zero))
        for at in range(layout.outputs, layout.outputs + layout.rows * layout.value_stride, 64):
            store_f32(memory + at, splat(zero))
        for row in range(layout.rows):
            store_f32(memory + layout.sums + row * 64, splat(zero))
            store_scalar_f32(memory + layout.maxima + 4 * row, no_maximum)
        for at in range(layout.zeros, layout.zeros + layout.zeros_bytes, 64):
            store_f32(memory + at, splat(zero))

    @helper
    def load_queries(arguments, memory, row, kv_head, tokens, tensor):
        """Copy the tile's queries."""
        head_stride = argument(arguments, AT.q_head)
        q = argument(arguments, tensor) + row * argument(arguments, AT.q_row) + kv_head * group * head_stride
        for token in range(tokens):
            for g in range(group):
                copy_row(q + g * head_stride, memory + layout.queries + (token * group + g) * layout.query_stride)
            q += argument(arguments, AT.q_row)

    @helper
    def pack_tile(arguments, memory, sequence, kv_head, begin, low, sinks_end, end):
        """Pack keys of [begin, begin + KEY_TILE) and their values: those below `end` that are sink tokens or at least `low`."""
        keys, values = memory + layout.key_addresses, memory + layout.value_addresses
        end = min(begin + KEY_TILE, end)
        fill_addresses(keys, values, KEY_TILE, memory + layout.zeros)
        run = max(begin, low)
        sinks = min(sinks_end, end, run)
        if begin < sinks:
            write_addresses(arguments, memory, sequence, kv_head, begin, sinks, keys, values)
        if run < end:
            skipped = 8 * (run - begin)
            write_addresses(arguments, memory, sequence, kv_head, run, end, keys + skipped, values + skipped)
        if has_scales:
            key_scales, value_scales = memory + layout.key_scales, memory + layout.value_scales
            clear_floats(key_scales, KEY_TILE)
            clear_floats(value_scales, KEY_TILE)
            if begin < sinks:
                write_scales(arguments, memory, sequence, kv_head, begin, sinks, key_scales, value_scales)
            if run < end:
                skipped = 4 * (run - begin)
                write_scales(
                    arguments, memory, sequence, kv_head, run, end, key_scales + skipped, value_scales + skipped
                )
        for key in range(0, end - begin, 32):
            pack_keys(keys + 8 * key, memory + layout.keys + key // 16 * layout.key_panel)
            pack_keys(keys + 8 * key + 128, memory + layout.keys + (key // 16 + 1) * layout.key_panel)
            for pair in range(key, key + 32, 2):
                pack_values(values + 8 * pair, memory + layout.values + pair // elements * 64)

    @helper
    def scale_row(scores, num_keys, key_scales):
        """Multiply scores by the scales of their keys."""
        for k in range(0, num_keys, 16):
            store_f32(scores + 4 * k, load_f32(scores + 4 * k) * load_f32(key_scales + 4 * k))

    @helper
    def softmax_row(scores, weights, sums, maximum, output, num_keys, factor, value_scales):
        """Turn a row's scores times `factor` into weights; rescale the row's sums so far to the new maximum."""
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
            store_weights(weights + layout.weight_bytes * k, weight)
        store_f32(sums, total)
        store_scalar_f32(maximum, new)
        if old != new:
            for at in range(0, layout.value_stride, 64):
                store_f32(output + at, load_f32(output + at) * rescale)

    @helper
    def cap_row(scores, num_keys, scale, cap):
        """Replace scores by soft_cap * tanh(score * scale / soft_cap)."""
        for k in range(0, num_keys, 16):
            store_f32(scores + 4 * k, tanh(load_f32(scores + 4 * k) * splat(scale / cap)) * splat(cap))

    @helper
    def mask_row(scores, num_keys, begin, low, high, sinks_end):
        """Overwrite the scores of keys that the row does not see with MASKED."""
        for k in range(0, num_keys, 16):
            store_f32(scores + 4 * k, keep_visible(load_f32(scores + 4 * k), begin + k, low, high, sinks_end, masked))

    @helper
    def attend_rows(arguments, memory, row, tokens, begin, sinks_end):
        """Attend with SUB_ROWS rows of the query tile to one tile of packed keys."""
        first, last = row // group, min((row + SUB_ROWS - 1) // group, tokens - 1)
        lows, highs = memory + layout.low_keys, memory + layout.high_keys
        # keys up to the last row's own one, as whole groups of 32, which products with AMX take; none if all rows end before
        num_keys = min(KEY_TILE, (load_i64(highs + 8 * last) - begin + 32) // 32 * 32)
        if num_keys <= 0 or (load_i64(lows + 8 * first) >= begin + KEY_TILE and sinks_end <= begin):
            return
        multiply_keys(memory, row, num_keys)
        end = begin + num_keys
        # whether a row does not see all of these keys
        is_masked = end - 1 > load_i64(highs + 8 * first) or (load_i64(lows + 8 * last) > begin and sinks_end < end)
        scale, cap = (
            float_of_bits(argument(arguments, RESULT.scale)),
            float_of_bits(argument(arguments, RESULT.soft_cap)),
        )
        factor = log2_e if has_soft_cap else scale * log2_e
        for r in range(SUB_ROWS):
            token, scores = min((row + r) // group, tokens - 1), memory + layout.scores + r * layout.score_stride
            if has_scales:
                scale_row(scores, num_keys, memory + layout.key_scales)
            if has_soft_cap:
                cap_row(scores, num_keys, scale, cap)
            if is_masked:
                mask_row(scores, num_keys, begin, load_i64(lows + 8 * token), load_i64(highs + 8 * token), sinks_end)
            softmax_row(
                scores,
                memory + layout.weights + r * layout.weight_stride,
                memory + layout.sums + (row + r) * 64,
                memory + layout.maxima + (row + r) * 4,
                memory + layout.outputs + (row + r) * layout.value_stride,
                num_keys,
                factor,
                memory + layout.value_scales,
            )
        multiply_values(memory, row, num_keys)

    @helper
    def attend_keys(arguments, memory, sequence, kv_head, tokens, low, sinks_end, end):
        """Loop over the key tiles of which at least one row sees keys."""
        if has_tiles:
            configure_tiles(memory + layout.tile_registers, 16)
        begin = 0
        while begin < end:
            if begin >= sinks_end:
                begin = max(begin, low // KEY_TILE * KEY_TILE)
            if begin < end:
                pack_tile(arguments, memory, sequence, kv_head, begin, low, sinks_end, end)
                for sub_row in range(0, tokens * group, SUB_ROWS):
                    attend_rows(arguments, memory, sub_row, tokens, begin, sinks_end)
            begin += KEY_TILE
        if has_tiles:
            release_tiles()

    @helper
    def store_rows(arguments, memory, row, kv_head, num_rows):
        """Store the results of the tile's rows."""
        for r in range(num_rows):
            top = load_scalar_f32(memory + layout.maxima + 4 * r)
            total = lane_sum(load_f32(memory + layout.sums + 64 * r))
            values = memory + layout.outputs + r * layout.value_stride
            store_row(arguments, row + r // group, kv_head * group + r % group, top, total, values)

    return TileLoops(begin_tile, load_queries, attend_keys, store_rows)

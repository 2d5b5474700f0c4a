"""Prompts for the CPU kernel of `paged_attention`: a tile of query tokens and one KV head, with online softmax over tiles of keys.

Key tiles begin at multiples of KEY_TILE, whatever the query tile, and keys that a row does not see weigh exactly 0: so a row does
not depend on the rows beside it. A key tile is packed once for all rows of the query tile (keys as columns of words, values as rows
of words); keys that no row sees are packed as zeros, because their slots may hold NaN.

A *row* is one query head of one token; the rows of a tile are ordered by token, then by head. 16 rows are computed together.

Legend: G query heads per KV head, D key width, Dv value width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from transom_kernels.cpu.simd import (
    LOAD_SCALAR,
    LOG2_E,
    NUM_BYTES,
    STORE,
    STORE_PART,
    exp2,
    float_of_bits,
    lane_max,
    lane_sum,
    load_f32,
    load_i32,
    load_scalar_f32,
    splat,
    store_bf16,
    store_f32,
    store_scalar_f32,
    tanh,
    vector_max,
)
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.work import argument
from transom_kernels.paged_attention.cpu_arguments import (
    ATTEND_FROM,
    KV_HEADS,
    NUM_SINK_TOKENS,
    OUT,
    Q_HEAD,
    Q_ROW,
    QUERY_OFFSET,
    SCALE,
    SINK_LOGITS,
    SINK_STRIDE,
    SOFT_CAP,
    START,
    Q,
)
from transom_kernels.paged_attention.cpu_inner_loops import (
    first_lane,
    keep_visible,
    make_copy_row,
    make_pack_keys,
    make_pack_values,
    make_product,
)
from transom_kernels.paged_attention.cpu_keys import MASKED, NO_MAXIMUM, fill_addresses, first_key, write_addresses
from transom_kernels.paged_attention.cpu_layout import KEY_TILE, SUB_ROWS, PromptLayout, words_of


def make_prompt(
    group: int, width: int, value_width: int, dtype: str, has_soft_cap: bool, sink_dtype: str | None
) -> Any:
    """attend_tile(arguments, scratch, sequence, first_token, kv_head)."""
    words = words_of(dtype)
    layout = PromptLayout(dtype, group, width, value_width)
    tokens_of_tile, element_bytes = layout.tokens, NUM_BYTES[dtype]
    queries_at, outputs_at, sums_at, maxima_at = layout.queries, layout.outputs, layout.sums, layout.maxima
    factors_at, scores_at, weights_at, zeros_at = layout.factors, layout.scores, layout.weights, layout.zeros
    key_addresses_at, value_addresses_at = layout.key_addresses, layout.value_addresses
    keys_at, values_at = layout.keys, layout.values
    tile_rows, zeros_bytes = layout.rows, layout.zeros_bytes
    query_stride, value_stride, weight_stride = layout.query_stride, layout.value_stride, layout.weight_stride
    score_stride, weight_bytes = layout.score_stride, layout.weight_bytes
    elements, key_words = words.elements, -(-width // words.elements)
    rows_at_once, columns_at_once = (8, 2) if cpu_target().avx512 else (4, 1)
    scores_product = make_product(
        words, rows_at_once, columns_at_once, (score_stride, query_stride, score_stride), rescales=False
    )
    values_product = make_product(
        words, rows_at_once, columns_at_once, (value_stride, weight_stride, value_stride), rescales=True
    )
    copy_row = make_copy_row(words, width)
    pack_keys = make_pack_keys(words, width, score_stride)
    pack_values = make_pack_values(words, value_width, value_stride)
    output_vectors = words.output_vectors(value_width)
    odd_column = output_vectors % columns_at_once  # the last vector alone
    last_product = make_product(words, rows_at_once, 1, (value_stride, weight_stride, value_stride), rescales=True)
    store_weights = store_bf16 if words.pairs else store_f32
    store, store_part = STORE[dtype], STORE_PART[dtype]
    full, tail = value_width // 16 * 16, value_width % 16
    sink_size = NUM_BYTES[sink_dtype] if sink_dtype else 0
    load_sink = LOAD_SCALAR[sink_dtype or "f32"]
    masked, no_maximum, log2_e = np.float32(MASKED), np.float32(NO_MAXIMUM), np.float32(LOG2_E)
    zero, one = np.float32(0.0), np.float32(1.0)

    @njit
    def load_queries(arguments, scratch, row, kv_head, tokens):
        """Copy the tile's queries and begin its results."""
        head_stride = argument(arguments, Q_HEAD)
        q = argument(arguments, Q) + row * argument(arguments, Q_ROW) + kv_head * group * head_stride
        for token in range(tokens):
            for g in range(group):
                copy_row(q + g * head_stride, scratch + queries_at + (token * group + g) * query_stride)
            q += argument(arguments, Q_ROW)
        for at in range(queries_at + tokens * group * query_stride, queries_at + tile_rows * query_stride, 64):
            store_f32(scratch + at, splat(zero))
        for at in range(outputs_at, outputs_at + tile_rows * value_stride, 64):
            store_f32(scratch + at, splat(zero))
        for row in range(tile_rows):
            store_f32(scratch + sums_at + row * 64, splat(zero))
            store_scalar_f32(scratch + maxima_at + 4 * row, no_maximum)
        for at in range(zeros_at, zeros_at + zeros_bytes, 64):
            store_f32(scratch + at, splat(zero))

    @njit
    def pack_tile(arguments, scratch, sequence, kv_head, begin, low, sinks_end, end):
        """Pack the keys [begin, begin + KEY_TILE) and their values: those below `end` that are sinks or at least `low`."""
        keys, values = scratch + key_addresses_at, scratch + value_addresses_at
        end = min(begin + KEY_TILE, end)
        fill_addresses(keys, values, KEY_TILE, scratch + zeros_at)
        run = max(begin, low)
        sinks = min(sinks_end, end, run)
        if begin < sinks:
            write_addresses(arguments, sequence, kv_head, begin, sinks, keys, values)
        if run < end:
            skipped = 8 * (run - begin)
            write_addresses(arguments, sequence, kv_head, run, end, keys + skipped, values + skipped)
        for key in range(0, end - begin, 16):
            pack_keys(keys + 8 * key, scratch + keys_at + 4 * key)
            for pair in range(key, key + 16, 2):
                pack_values(values + 8 * pair, scratch + values_at + pair // elements * value_stride)

    @njit
    def softmax_row(
        scores, weights, sums, maximum, rescaling, num_keys, begin, low, high, sinks_end, is_masked, scale, cap
    ):
        """Weights of one row's scores; update its maximum and sums, and store the factor for what was summed before."""
        old, factor = load_scalar_f32(maximum), splat(scale * log2_e)
        top = splat(old)
        for k in range(0, num_keys, 16):
            x = load_f32(scores + 4 * k)
            x = x * factor if not has_soft_cap else tanh(x * splat(scale / cap)) * splat(cap * log2_e)
            if is_masked:
                x = keep_visible(x, begin + k, low, high, sinks_end, masked)
            store_f32(scores + 4 * k, x)
            top = vector_max(top, x)
        new = lane_max(top)
        rescale = exp2(splat(old - new))
        total = load_f32(sums) * rescale
        for k in range(0, num_keys, 16):
            weight = exp2(load_f32(scores + 4 * k) - splat(new))
            total = total + weight
            store_weights(weights + weight_bytes * k, weight)
        store_f32(sums, total)
        store_scalar_f32(maximum, new)
        store_scalar_f32(rescaling, first_lane(rescale))

    @njit
    def attend_rows(arguments, scratch, row, tokens, position, attend_from, begin):
        """16 rows of the tile and one tile of packed keys. `position` is the tile's first token's."""
        first = position + row // group
        last = position + min((row + SUB_ROWS - 1) // group, tokens - 1)
        num_keys = min(KEY_TILE, (last - begin + 16) // 16 * 16)
        sinks_end = argument(arguments, NUM_SINK_TOKENS)
        if num_keys <= 0 or (first_key(arguments, first, attend_from) >= begin + KEY_TILE and sinks_end <= begin):
            return
        for k in range(0, num_keys, 16 * columns_at_once):
            for r in range(0, SUB_ROWS, rows_at_once):
                scores_product(
                    scratch + scores_at + r * score_stride + 4 * k,
                    scratch + queries_at + (row + r) * query_stride,
                    scratch + keys_at + 4 * k,
                    key_words,
                    0,
                )
        end = begin + num_keys
        is_masked = end - 1 > first or (first_key(arguments, last, attend_from) > begin and sinks_end < end)
        scale, cap = float_of_bits(argument(arguments, SCALE)), float_of_bits(argument(arguments, SOFT_CAP))
        for r in range(SUB_ROWS):
            at = position + min((row + r) // group, tokens - 1)
            softmax_row(
                scratch + scores_at + r * score_stride,
                scratch + weights_at + r * weight_stride,
                scratch + sums_at + (row + r) * 64,
                scratch + maxima_at + (row + r) * 4,
                scratch + factors_at + r * 4,
                num_keys,
                begin,
                first_key(arguments, at, attend_from),
                at,
                sinks_end,
                is_masked,
                scale,
                cap,
            )
        for r in range(0, SUB_ROWS, rows_at_once):
            out = scratch + outputs_at + (row + r) * value_stride
            weights, factors = scratch + weights_at + r * weight_stride, scratch + factors_at + r * 4
            for j in range(0, output_vectors - odd_column, columns_at_once):
                values_product(out + 64 * j, weights, scratch + values_at + 64 * j, num_keys // elements, factors)
            if odd_column:
                j = output_vectors - 1
                last_product(out + 64 * j, weights, scratch + values_at + 64 * j, num_keys // elements, factors)

    @njit
    def store_rows(arguments, scratch, row, kv_head, num_rows):
        """Divide by the sums and round. A row without keys gets zeros."""
        heads = argument(arguments, KV_HEADS) * group
        for r in range(num_rows):
            head = kv_head * group + r % group
            out = argument(arguments, OUT) + ((row + r // group) * heads + head) * value_width * element_bytes
            top, total = load_scalar_f32(scratch + maxima_at + 4 * r), lane_sum(load_f32(scratch + sums_at + 64 * r))
            factor = one
            if sink_size:
                sink = load_sink(argument(arguments, SINK_LOGITS) + head * argument(arguments, SINK_STRIDE)) * log2_e
                joint = max(top, sink)
                factor = first_lane(exp2(splat(top - joint)))
                total = total * factor + first_lane(exp2(splat(sink - joint)))
            inverse = splat(factor / total if total > zero else zero)
            of = scratch + outputs_at + r * value_stride
            for j in range(0, full, 16):
                store(out + j * element_bytes, load_f32(of + 4 * j) * inverse)
            if tail:
                store_part(out + full * element_bytes, load_f32(of + 4 * full) * inverse, tail)

    @njit
    def attend_tile(arguments, scratch, sequence, first_token, kv_head):
        """One tile of query tokens: loop over the tiles of keys that some row sees."""
        offsets = argument(arguments, QUERY_OFFSET) + 4 * sequence
        row = load_i32(offsets) + first_token
        tokens = min(tokens_of_tile, load_i32(offsets + 4) - row)
        position = load_i32(argument(arguments, START) + 4 * sequence) + first_token
        attend_from = load_i32(argument(arguments, ATTEND_FROM) + 4 * sequence)
        end = position + tokens
        low = first_key(arguments, position, attend_from)
        sinks_end = min(argument(arguments, NUM_SINK_TOKENS), end)
        load_queries(arguments, scratch, row, kv_head, tokens)
        begin = 0
        while begin < end:
            if begin >= sinks_end:
                begin = max(begin, low // KEY_TILE * KEY_TILE)
            if begin < end:
                pack_tile(arguments, scratch, sequence, kv_head, begin, low, sinks_end, end)
                for sub_row in range(0, tokens * group, SUB_ROWS):
                    attend_rows(arguments, scratch, sub_row, tokens, position, attend_from, begin)
            begin += KEY_TILE
        store_rows(arguments, scratch, row, kv_head, tokens * group)

    return attend_tile

"""Decoding for the CPU kernel of `paged_attention`: one query row and one KV head, straight on the blocks of the KV cache.

- unit: the keys between two multiples of UNIT_KEYS that a row sees; sink tokens before the run have units of their own.
- partial result: what a unit leaves for each query head of the KV head: the maximum of the scores (base 2), the sum of the weights
  and the weighted values.
- slot: one of several items that share a row. Slot s of S computes the units s, s + S, ...

Partial results are merged in the order of their keys: by the item that computed them or, where slots share a row, by a second
launch. Both do the same operations, so the result does not depend on the number of slots.

Example: without a window, the row at position 600 has the units [0, 256), [256, 512) and [512, 601). With two slots the first
computes the units 0 and 2, the second unit 1.

Legend: G query heads per KV head, D key width, Dv value width.
"""

from __future__ import annotations

from typing import Any

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
    load_i32,
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
from transom_kernels.cpu.work import argument
from transom_kernels.paged_attention.cpu_arguments import (
    ATTEND_FROM,
    KV_HEADS,
    MAX_UNITS,
    NUM_SINK_TOKENS,
    NUM_SLOTS,
    OUT,
    PARTIALS,
    Q_HEAD,
    Q_ROW,
    QUERY_OFFSET,
    SCALE,
    SOFT_CAP,
    START,
    Q,
)
from transom_kernels.paged_attention.cpu_inner_loops import (
    first_lane,
    keep_visible,
    make_copy_row,
    make_group_scores,
    make_weighted_sum,
    num_accumulators,
)
from transom_kernels.paged_attention.cpu_integers import integer_words, make_round_query, make_round_weights
from transom_kernels.paged_attention.cpu_keys import (
    MASKED,
    NO_MAXIMUM,
    TABLE,
    first_key,
)
from transom_kernels.paged_attention.cpu_layout import UNIT_KEYS, DecodeLayout, is_quantised, words_of
from transom_kernels.paged_attention.cpu_row_result import make_store_row
from transom_kernels.paged_attention.cpu_walks import clear_floats, make_find_groups, make_write_scales

_HEADS_AT_ONCE = 8  # query heads whose weighted values are summed together


def make_units(
    group: int,
    width: int,
    value_width: int,
    dtype: str,
    has_soft_cap: bool,
    find_groups: Any,
    stored: str | None = None,
    write_scales: Any = None,
) -> Any:
    """attend_unit(arguments, scratch, sequence, kv_head, begin, end, partial) for the keys [begin, end) of a unit.

    `find_groups` is what `cpu_walks.make_find_groups` makes, or a function like it. For quantised caches `stored` is how they are
    stored, and `write_scales` what `cpu_walks.make_write_scales` makes.
    """
    integers, layout = integer_words(dtype, stored, width), DecodeLayout(dtype, group, width, value_width)
    words, has_integers = integers or words_of(dtype, stored), integers is not None
    has_scales, key_scales_at, value_scales_at = is_quantised(dtype, stored), layout.key_scales, layout.value_scales
    score_stride, weight_stride = layout.score_stride, layout.weight_stride
    keys_at, values_at = layout.key_groups, layout.value_groups
    queries_at, scores_at, weights_at = layout.queries, layout.scores, layout.weights
    products_at = layout.integer_queries if has_integers else queries_at
    query_stride, integer_query_stride = layout.query_stride, layout.integer_query_stride
    product_stride = integer_query_stride if has_integers else query_stride
    round_query = make_round_query(dtype, width, integer_query_stride)
    round_weights = make_round_weights(weight_stride)
    partial_stride, statistics, weight_bytes = layout.partial_stride, layout.statistics, layout.weight_bytes
    heads = min(group, _HEADS_AT_ONCE, max(1, num_accumulators() // words.elements))
    rest = group % heads
    group_scores = make_group_scores(words, group, width, value_width, (product_stride, score_stride))
    strides = (weight_stride, partial_stride)
    weighted_sum = make_weighted_sum(words, heads, value_width, strides)
    weighted_rest = make_weighted_sum(words, rest or 1, value_width, strides)
    store_weights, weight_of = (store_bf16, weight_bf16) if words.pairs else (store_f32, weight_f32)
    masked, no_maximum, log2_e = np.float32(MASKED), np.float32(NO_MAXIMUM), np.float32(LOG2_E)
    zero = np.float32(0.0)

    @njit
    def softmax(scores, weights, first, begin, end, factor, soft_cap, statistics_at, key_scales, value_scales):
        """weights = 2 ** (score - maximum); store maximum and sum. Scores become base 2. Key `first` has the first score.

        Of a quantised cache scores are multiplied by the keys' scales before, and weights by the values' scales behind the sum.
        """
        top = splat(no_maximum)
        for key in range(first, end, 16):
            at = scores + 4 * (key - first)
            x = load_f32(at) * splat(factor)
            if has_scales:
                x = x * load_f32(key_scales + 4 * (key - first))
            if has_soft_cap:
                x = tanh(x) * splat(soft_cap * log2_e)
            if key < begin or key + 16 > end:
                x = keep_visible(x, key, begin, end - 1, key, masked)
            store_f32(at, x)
            top = vector_max(top, x)
        maximum = lane_max(top)
        total = splat(zero)
        for key in range(first, end, 16):
            weight = weight_of(load_f32(scores + 4 * (key - first)) - splat(maximum))
            total = total + weight
            if has_scales:
                weight = weight * load_f32(value_scales + 4 * (key - first))
            if has_integers:
                store_f32(scores + 4 * (key - first), weight)
            else:
                store_weights(weights + weight_bytes * (key - first), weight)
        if has_integers:
            round_weights(scores, weights, (end - first + 15) // 16 * 16)
        store_scalar_f32(statistics_at, maximum)
        store_scalar_f32(statistics_at + 4, lane_sum(total))

    @njit
    def attend_unit(arguments, scratch, sequence, kv_head, begin, end, partial):
        """Attention of the queries in scratch to some keys."""
        first, keys, values = begin // 16 * 16, scratch + keys_at, scratch + values_at
        num_groups = (end - first + 15) // 16
        find_groups(arguments, scratch, sequence, kv_head, begin, end, keys, values)
        key_scales, value_scales = scratch + key_scales_at, scratch + value_scales_at
        if has_scales:
            clear_floats(key_scales, 16 * num_groups)
            clear_floats(value_scales, 16 * num_groups)
            at = 4 * (begin - first)
            write_scales(arguments, scratch, sequence, kv_head, begin, end, key_scales + at, value_scales + at)
        if has_integers:
            for g in range(group):
                round_query(scratch + queries_at + g * query_stride, scratch + products_at + g * integer_query_stride)
        group_scores(keys, values, num_groups, scratch + products_at, scratch + scores_at)
        scale, soft_cap = float_of_bits(argument(arguments, SCALE)), float_of_bits(argument(arguments, SOFT_CAP))
        factor = scale / soft_cap if has_soft_cap else scale * log2_e
        for g in range(group):
            scores, weights = scratch + scores_at + g * score_stride, scratch + weights_at + g * weight_stride
            at = partial + g * partial_stride + statistics
            softmax(scores, weights, first, begin, end, factor, soft_cap, at, key_scales, value_scales)
        weights = scratch + weights_at
        for g in range(0, group - rest, heads):
            weighted_sum(values, num_groups, weights + g * weight_stride, partial + g * partial_stride)
        if rest:
            g = group - rest
            weighted_rest(values, num_groups, weights + g * weight_stride, partial + g * partial_stride)

    return attend_unit


def make_results(group: int, value_width: int, dtype: str, sink_dtype: str | None) -> tuple[Any, Any]:
    """merge(total, partial), which adds a unit's partial result to a row's, and store_result(arguments, row, kv_head, total)."""
    layout = DecodeLayout(dtype, group, 1, value_width)
    partial_stride, statistics = layout.partial_stride, layout.statistics
    store_row, row_bytes = make_store_row(value_width, dtype, sink_dtype), value_width * NUM_BYTES[dtype]
    no_maximum, zero = np.float32(NO_MAXIMUM), np.float32(0.0)

    @njit
    def merge(total, partial):
        """Rescale both to the larger maximum and add them."""
        for g in range(group):
            to, of = total + g * partial_stride, partial + g * partial_stride
            old, new = load_scalar_f32(to + statistics), load_scalar_f32(of + statistics)
            top = max(old, new)
            a, b = exp2(splat(old - top)), exp2(splat(new - top))
            for at in range(0, statistics, 64):
                store_f32(to + at, fma(load_f32(to + at), a, load_f32(of + at) * b))
            store_scalar_f32(to + statistics, top)
            sums = splat(load_scalar_f32(to + statistics + 4)) * a + splat(load_scalar_f32(of + statistics + 4)) * b
            store_scalar_f32(to + statistics + 4, first_lane(sums))

    @njit
    def clear(total):
        """The result of no keys."""
        for g in range(group):
            for at in range(0, partial_stride, 64):
                store_f32(total + g * partial_stride + at, splat(zero))
            store_scalar_f32(total + g * partial_stride + statistics, no_maximum)

    @njit
    def store_result(arguments, row, kv_head, total):
        """Store the result of each of the KV head's query heads."""
        head = kv_head * group
        out = argument(arguments, OUT) + (row * argument(arguments, KV_HEADS) * group + head) * row_bytes
        for g in range(group):
            of = total + g * partial_stride
            top, weight_sum = load_scalar_f32(of + statistics), load_scalar_f32(of + statistics + 4)
            store_row(arguments, head + g, top, weight_sum, of, out)
            out += row_bytes

    return merge, clear, store_result


@njit
def unit_counts(arguments, position, low):
    """Units of the sink tokens that lie before `low`, and units of the run [low, position]."""
    sinks_end = min(argument(arguments, NUM_SINK_TOKENS), position + 1, low)
    run = position // UNIT_KEYS + 1 - low // UNIT_KEYS if low <= position else 0
    return (sinks_end + UNIT_KEYS - 1) // UNIT_KEYS, run


@njit
def unit_range(arguments, position, low, num_sink_units, unit):
    """The keys [begin, end) of a unit."""
    if unit < num_sink_units:
        sinks_end = min(argument(arguments, NUM_SINK_TOKENS), position + 1, low)
        return unit * UNIT_KEYS, min((unit + 1) * UNIT_KEYS, sinks_end)
    number = low // UNIT_KEYS + unit - num_sink_units
    return max(low, number * UNIT_KEYS), min((number + 1) * UNIT_KEYS, position + 1)


def make_decode(
    group: int,
    width: int,
    value_width: int,
    dtype: str,
    has_soft_cap: bool,
    sink_dtype: str | None,
    stored: str | None = None,
) -> tuple[Any, Any]:
    """decode(arguments, scratch, sequence, kv_head, slot) and combine(arguments, scratch, sequence, kv_head)."""
    layout = DecodeLayout(dtype, group, width, value_width)
    queries_at, query_stride = layout.queries, layout.query_stride
    partial_at, total_at, partial_bytes = layout.partial, layout.total, layout.partial_bytes
    find_groups = make_find_groups(TABLE, layout.key_copies, layout.value_copies, stored or dtype, width, value_width)
    write_scales = make_write_scales(TABLE)
    attend_unit = make_units(group, width, value_width, dtype, has_soft_cap, find_groups, stored, write_scales)
    merge, clear, store_result = make_results(group, value_width, dtype, sink_dtype)
    copy_row = make_copy_row(words_of(dtype), width)

    @njit
    def attend_row(arguments, scratch, sequence, kv_head, slot, row, position):
        """One query row. Slot s of S takes the units s, s + S, ..."""
        low = first_key(arguments, position, load_i32(argument(arguments, ATTEND_FROM) + 4 * sequence))
        num_sink_units, num_run_units = unit_counts(arguments, position, low)
        num_units, num_slots = num_sink_units + num_run_units, argument(arguments, NUM_SLOTS)
        shared = num_slots > 1 and num_units > 1
        if slot > 0 and (slot >= num_units or not shared):
            return
        q = argument(arguments, Q) + row * argument(arguments, Q_ROW) + kv_head * group * argument(arguments, Q_HEAD)
        for g in range(group):
            copy_row(q + g * argument(arguments, Q_HEAD), scratch + queries_at + g * query_stride)
        partials = argument(arguments, PARTIALS)
        partials += (row * argument(arguments, KV_HEADS) + kv_head) * argument(arguments, MAX_UNITS) * partial_bytes
        total, partial = scratch + total_at, scratch + partial_at
        if num_units == 0:
            clear(total)
        for unit in range(slot, num_units, num_slots if shared else 1):
            begin, end = unit_range(arguments, position, low, num_sink_units, unit)
            to = partials + unit * partial_bytes if shared else (partial if unit > 0 else total)
            attend_unit(arguments, scratch, sequence, kv_head, begin, end, to)
            if not shared and unit > 0:
                merge(total, partial)
        if not shared:
            store_result(arguments, row, kv_head, total)

    @njit
    def combine_row(arguments, sequence, kv_head, row, position):
        """Merge the partial results of a row, if slots shared it."""
        low = first_key(arguments, position, load_i32(argument(arguments, ATTEND_FROM) + 4 * sequence))
        num_sink_units, num_run_units = unit_counts(arguments, position, low)
        if num_sink_units + num_run_units > 1:
            partials = argument(arguments, PARTIALS)
            partials += (row * argument(arguments, KV_HEADS) + kv_head) * argument(arguments, MAX_UNITS) * partial_bytes
            for unit in range(1, num_sink_units + num_run_units):
                merge(partials, partials + unit * partial_bytes)
            store_result(arguments, row, kv_head, partials)

    @njit
    def decode(arguments, scratch, sequence, kv_head, slot):
        """All query rows of a sequence."""
        offsets = argument(arguments, QUERY_OFFSET) + 4 * sequence
        first, last = load_i32(offsets), load_i32(offsets + 4)
        start = load_i32(argument(arguments, START) + 4 * sequence)
        for row in range(first, last):
            attend_row(arguments, scratch, sequence, kv_head, slot, row, start + row - first)

    @njit
    def combine(arguments, sequence, kv_head):
        """All query rows of a sequence."""
        offsets = argument(arguments, QUERY_OFFSET) + 4 * sequence
        first, last = load_i32(offsets), load_i32(offsets + 4)
        start = load_i32(argument(arguments, START) + 4 * sequence)
        for row in range(first, last):
            combine_row(arguments, sequence, kv_head, row, start + row - first)

    return decode, combine

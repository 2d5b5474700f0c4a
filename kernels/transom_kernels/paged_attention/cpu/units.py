"""Computes a unit of a decoding row: attention of one query token and KV head to a range of keys, stored as a partial result
(`row_results.py`).

Queries and weights are words of floats, or 16-bit integers if the cache is int8 or int4. In a quantised cache the scale of a key
multiplies its score, and the scale of a value multiplies its weight after the weights were summed.

16-bit integers are multiplied in pairs and summed in int32. Widening stored numbers to 16-bit integers takes one instruction (to
bfloat16: five), and integer products take half the time of bfloat16 products. Queries and softmax weights are rounded to 16-bit
integers, with a scale for each query and each unit's weights: 250 times finer (32767 / 127) than the stored numbers.
Sums do not overflow: 512 products (MAX_WIDTH) of 32767 and at most 127, or 256 of weights, stay below 2 ** 31.

Legend: G query heads per KV head.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from transom_kernels.cpu.language import FLOATS, INT, NOTHING, emits
from transom_kernels.cpu.simd import (
    LOAD_LANES,
    LOG2_E,
    NUM_BYTES,
    float_of_bits,
    lane_max,
    lane_sum,
    load_f32,
    splat,
    store_bf16,
    store_f32,
    store_scalar_f32,
    tanh,
    vector_abs,
    vector_max,
    weight_bf16,
    weight_f32,
)
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import F32_16, I16, I32_16, LANES, function, store
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu.decode_loops import make_group_scores, make_weighted_sum
from transom_kernels.paged_attention.cpu.layout import (
    AT,
    MASKED,
    NO_MAXIMUM,
    RESULT,
    AttentionKind,
    Words,
    decode_layout,
)
from transom_kernels.paged_attention.cpu.row_vectors import keep_visible, make_copy_row, num_accumulators
from transom_kernels.paged_attention.cpu.tables import clear_floats
from transom_kernels.quantised_kv.cpu_rows import row_bytes

LARGEST = 32767.0
MAX_WIDTH = 512
_I16_16 = ir.VectorType(I16, LANES)


def integer_words(kind: AttentionKind) -> Words | None:
    """Return how rows of the cache are multiplied as integers; None if they are multiplied as floats."""
    if kind.dtype == "f32":  # decoding must round as prompts do, and 16-bit integers would round float32 queries
        return None
    target = cpu_target()
    if kind.stored not in ("i8", "i4") or kind.width > MAX_WIDTH or not (target.x86 and target.avx2):
        return None
    return Words(kind.stored, pairs=False, halves=True)


@emits(NOTHING, INT, FLOATS)
def _store_halves(b, address, x):
    """Round 16 numbers and store them as 16-bit integers."""
    rint = function(b, f"llvm.rint.v{LANES}f32", F32_16, [F32_16])
    store(b, b.trunc(b.fptosi(b.call(rint, [x]), I32_16), _I16_16), address, 2)


def make_round_row(dtype: str, stride: int) -> Any:
    """Build round_row(row, count, out), which stores `count` numbers of `dtype` as 16-bit integers, and their scale.

    The scale is in the last 64 of the `stride` bytes of `out`; it is NaN if a number is not finite. Integers after the row, up to a
    multiple of 32, are 0.
    """
    load, size = LOAD_LANES[dtype], NUM_BYTES[dtype]
    largest, tiny, zero = np.float32(LARGEST), np.float32(1e-30), np.float32(0.0)

    @helper
    def round_row(row, count, out):
        top, undefined = splat(zero), splat(zero)  # `undefined` becomes NaN where a number is not finite
        for k in range(0, count, 16):
            x = load(row + k * size, count - k)
            top, undefined = vector_max(top, vector_abs(x)), undefined + x * splat(zero)
        maximum = lane_max(top)
        inverse = splat(largest / maximum if maximum > tiny else zero)
        for k in range(0, count, 16):
            _store_halves(out + 2 * k, load(row + k * size, count - k) * inverse)
        if (count + 15) // 16 % 2:  # an odd number of vectors of 16 integers
            _store_halves(out + 2 * ((count + 15) // 16 * 16), splat(zero))
        store_scalar_f32(out + stride - 64, maximum / largest + lane_sum(undefined))

    return round_row


_HEADS_AT_ONCE = 8  # query heads whose weighted values are summed together


def make_load_queries(kind: AttentionKind, *, as_integers: bool) -> Any:
    """Build load_queries(arguments, memory, row, kv_head, tensor): copy a row's queries of a KV head out of argument `tensor`.

    Queries become words of floats, or 16-bit integers with their scale.
    """
    layout, group, width = decode_layout(kind), kind.group, kind.width
    copy_row, round_row = make_copy_row(kind.words, width), make_round_row(kind.dtype, layout.integer_query_stride)

    @helper
    def load_queries(arguments, memory, row, kv_head, tensor):
        head_stride = argument(arguments, AT.q_head)
        q = argument(arguments, tensor) + row * argument(arguments, AT.q_row) + kv_head * group * head_stride
        for g in range(group):
            if as_integers:
                round_row(q + g * head_stride, width, memory + layout.integer_queries + g * layout.integer_query_stride)
            else:
                copy_row(q + g * head_stride, memory + layout.queries + g * layout.query_stride)

    return load_queries


def make_attend_unit(
    kind: AttentionKind, find_groups: Any, write_scales: Any = None, *, prefetches_next: bool = False
) -> Any:
    """Build attend_unit(arguments, memory, sequence, kv_head, begin, end, partial): it attends to the keys [begin, end) and writes
    a partial result.

    The queries are those that `load_queries` has left in memory, integers if `integer_words` says so. `find_groups` and, for
    quantised caches, `write_scales` are functions like those that `tables.make_find_groups` and `make_write_scales` build. With
    `prefetches_next` the caller has written, at `next_keys` of the layout, the addresses of the keys that it will attend to next.
    """
    layout, group, has_scales, has_soft_cap = decode_layout(kind), kind.group, kind.has_scales, kind.has_soft_cap
    integers = integer_words(kind)
    words, has_integers = integers or kind.cached, integers is not None
    products_at = layout.integer_queries if has_integers else layout.queries
    product_stride = layout.integer_query_stride if has_integers else layout.query_stride
    round_row = make_round_row("f32", layout.weight_stride)
    heads = min(group, _HEADS_AT_ONCE, max(1, num_accumulators() // words.elements))
    rest = group % heads
    group_scores = make_group_scores(words, group, kind.width, kind.value_width, (product_stride, layout.score_stride))
    strides = (layout.weight_stride, layout.partial_stride)
    next_bytes = row_bytes(words.stored, kind.width) if prefetches_next else 0
    weighted_sum, weighted_rest = (
        make_weighted_sum(words, count, kind.value_width, strides, next_bytes if is_first else 0)
        for count, is_first in ((heads, True), (rest or 1, False))
    )
    store_weights, weight_of = (store_bf16, weight_bf16) if words.pairs else (store_f32, weight_f32)
    masked, no_maximum, log2_e = np.float32(MASKED), np.float32(NO_MAXIMUM), np.float32(LOG2_E)
    zero = np.float32(0.0)

    @helper
    def softmax(scores, weights, first, begin, end, factor, soft_cap, statistics_at, key_scales, value_scales):
        """Turn scores, which begin with key `first`, into weights 2 ** (score - maximum); store maximum (base 2) and sum."""
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
                store_weights(weights + layout.weight_bytes * (key - first), weight)
        if has_integers:
            round_row(scores, (end - first + 15) // 16 * 16, weights)
        store_scalar_f32(statistics_at, maximum)
        store_scalar_f32(statistics_at + 4, lane_sum(total))

    @helper
    def attend_unit(arguments, memory, sequence, kv_head, begin, end, partial):
        first, keys, values = begin // 16 * 16, memory + layout.key_groups, memory + layout.value_groups
        num_groups = (end - first + 15) // 16
        find_groups(arguments, memory, sequence, kv_head, begin, end, keys, values)
        key_scales, value_scales = memory + layout.key_scales, memory + layout.value_scales
        if has_scales:
            clear_floats(key_scales, 16 * num_groups)
            clear_floats(value_scales, 16 * num_groups)
            at = 4 * (begin - first)
            write_scales(arguments, memory, sequence, kv_head, begin, end, key_scales + at, value_scales + at)
        group_scores(keys, values, num_groups, memory + products_at, memory + layout.scores)
        scale = float_of_bits(argument(arguments, RESULT.scale))
        soft_cap = float_of_bits(argument(arguments, RESULT.soft_cap))
        factor = scale / soft_cap if has_soft_cap else scale * log2_e
        for g in range(group):
            scores = memory + layout.scores + g * layout.score_stride
            weights = memory + layout.weights + g * layout.weight_stride
            at = partial + g * layout.partial_stride + layout.statistics
            softmax(scores, weights, first, begin, end, factor, soft_cap, at, key_scales, value_scales)
        weights, next_keys = memory + layout.weights, memory + layout.next_keys
        for g in range(0, group - rest, heads):
            of_g, out = weights + g * layout.weight_stride, partial + g * layout.partial_stride
            weighted_sum(values, num_groups, of_g, out, next_keys)
        if rest:
            g = group - rest
            of_g, out = weights + g * layout.weight_stride, partial + g * layout.partial_stride
            weighted_rest(values, num_groups, of_g, out, next_keys)

    return attend_unit

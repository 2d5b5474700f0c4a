"""Results of attention rows: how a row is finished and stored, and the partial results of decoding rows.

A row is finished by adding the sink logit to its softmax and dividing the weighted values by the softmax sum.

A *partial result* is the attention of one unit of keys, for each query head of a KV head: the sum of its weighted values in float32
and, at the layout's `statistics`, the maximum of its scores (base 2) and the sum of its weights 2 ** (score - maximum).

Legend: T query tokens, H query heads, Dv value width.
"""

from typing import Any, NamedTuple

import numpy as np

from transom_kernels.cpu.simd import (
    LOAD_SCALAR,
    LOG2_E,
    NUM_BYTES,
    STORE_LANES,
    exp2,
    fma,
    load_f32,
    load_scalar_f32,
    splat,
    store_f32,
    store_scalar_f32,
)
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu.layout import NO_MAXIMUM, RESULT, AttentionKind, decode_layout
from transom_kernels.paged_attention.cpu.row_vectors import first_lane


def make_store_row(kind: AttentionKind) -> Any:
    """Build store_row(arguments, row, head, top, weight_sum, values): out[row, head] = values / weight_sum, rounded once.

    `top` is the maximum of the row's scores (base 2), and `weight_sum` the sum of its weights 2 ** (score - top); `values` is the
    address of Dv weighted values in float32, padded to a multiple of 16. A row without keys gets zeros. Maximum and sum, the sink
    logit included, are stored in the statistics [T, H, 2] if there are any.
    """
    store, size = STORE_LANES[kind.dtype], NUM_BYTES[kind.dtype]
    group, value_width = kind.group, kind.value_width
    has_sink, load_sink = kind.sink_dtype is not None, LOAD_SCALAR[kind.sink_dtype or "f32"]
    log2_e, zero, one = np.float32(LOG2_E), np.float32(0.0), np.float32(1.0)

    @helper
    def store_row(arguments, row, head, top, weight_sum, values):
        factor = one
        if has_sink:
            sink = load_sink(argument(arguments, RESULT.sink_logits) + head * argument(arguments, RESULT.sink_stride))
            sink *= log2_e
            joint = max(top, sink)
            factor = first_lane(exp2(splat(top - joint)))
            weight_sum = weight_sum * factor + first_lane(exp2(splat(sink - joint)))
            top = joint
        inverse = splat(factor / weight_sum if weight_sum > zero else zero)
        place = row * argument(arguments, RESULT.kv_heads) * group + head  # index of [row, head] in [T, H]
        out = argument(arguments, RESULT.out) + place * value_width * size
        for j in range(0, value_width, 16):
            store(out + j * size, load_f32(values + 4 * j) * inverse, value_width - j)
        statistics = argument(arguments, RESULT.statistics)
        if statistics:
            store_scalar_f32(statistics + 8 * place, top)
            store_scalar_f32(statistics + 8 * place + 4, weight_sum)

    return store_row


class PartialResults(NamedTuple):
    """Functions over the partial results of a row and KV head.

    - merge(total, partial): add a unit's partial result to that of the units before.
    - clear(total): write the partial result of no keys.
    - store(arguments, row, kv_head, total): turn the row's partial result into outputs of the KV head's query heads.
    """

    merge: Any
    clear: Any
    store: Any


def make_partial_results(kind: AttentionKind) -> PartialResults:
    """Build the functions for a kind of attention; only its value width, group and types of results matter."""
    layout, group, store_row = decode_layout(kind), kind.group, make_store_row(kind)
    no_maximum, zero = np.float32(NO_MAXIMUM), np.float32(0.0)

    @helper
    def merge(total, partial):
        """Rescale both to the larger maximum and add them."""
        for g in range(group):
            to, of = total + g * layout.partial_stride, partial + g * layout.partial_stride
            to_statistics, of_statistics = to + layout.statistics, of + layout.statistics
            old, new = load_scalar_f32(to_statistics), load_scalar_f32(of_statistics)
            top = max(old, new)
            a, b = exp2(splat(old - top)), exp2(splat(new - top))
            for at in range(0, layout.statistics, 64):
                store_f32(to + at, fma(load_f32(to + at), a, load_f32(of + at) * b))
            store_scalar_f32(to_statistics, top)
            sums = splat(load_scalar_f32(to_statistics + 4)) * a + splat(load_scalar_f32(of_statistics + 4)) * b
            store_scalar_f32(to_statistics + 4, first_lane(sums))

    @helper
    def clear(total):
        for g in range(group):
            for at in range(0, layout.partial_stride, 64):
                store_f32(total + g * layout.partial_stride + at, splat(zero))
            store_scalar_f32(total + g * layout.partial_stride + layout.statistics, no_maximum)

    @helper
    def store(arguments, row, kv_head, total):
        for g in range(group):
            of = total + g * layout.partial_stride
            statistics = of + layout.statistics
            top, weight_sum = load_scalar_f32(statistics), load_scalar_f32(statistics + 4)
            store_row(arguments, row, kv_head * group + g, top, weight_sum, of)

    return PartialResults(merge, clear, store)

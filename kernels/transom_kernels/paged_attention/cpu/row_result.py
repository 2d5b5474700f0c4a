"""Finishes a row of attention: adds the sink logit to its softmax, divides the weighted values by the softmax sum, and stores.

Legend: T query tokens, H query heads, Dv value width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from transom_kernels.cpu.simd import (
    LOAD_SCALAR,
    LOG2_E,
    NUM_BYTES,
    STORE,
    STORE_PART,
    exp2,
    load_f32,
    splat,
    store_scalar_f32,
)
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu.arguments import RESULT
from transom_kernels.paged_attention.cpu.layout import AttentionKind
from transom_kernels.paged_attention.cpu.row_vectors import first_lane


def make_store_row(kind: AttentionKind) -> Any:
    """Build store_row(arguments, row, head, top, weight_sum, values): out[row, head] = values / weight_sum, rounded once.

    `top` is the maximum of the row's scores (base 2), and `weight_sum` the sum of its weights 2 ** (score - top); `values` is the
    address of Dv weighted values in float32, padded to a multiple of 16. A row without keys gets zeros. Maximum and sum, the sink
    logit included, are stored in the statistics [T, H, 2] if there are any.
    """
    store, store_part, size = STORE[kind.dtype], STORE_PART[kind.dtype], NUM_BYTES[kind.dtype]
    group, value_width = kind.group, kind.value_width
    full, tail = value_width // 16 * 16, value_width % 16
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
        for j in range(0, full, 16):
            store(out + j * size, load_f32(values + 4 * j) * inverse)
        if tail:
            store_part(out + full * size, load_f32(values + 4 * full) * inverse, tail)
        statistics = argument(arguments, RESULT.statistics)
        if statistics:
            store_scalar_f32(statistics + 8 * place, top)
            store_scalar_f32(statistics + 8 * place + 4, weight_sum)

    return store_row

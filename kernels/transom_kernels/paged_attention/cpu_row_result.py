"""Ends a row of the CPU kernels of `paged_attention`: the sink joins its softmax, and the weighted values become its result.

Legend: Dv value width.
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
    load_f32,
    splat,
)
from transom_kernels.cpu.work import argument
from transom_kernels.paged_attention.cpu_arguments import SINK_LOGITS, SINK_STRIDE
from transom_kernels.paged_attention.cpu_inner_loops import first_lane


def make_store_row(value_width: int, dtype: str, sink_dtype: str | None) -> Any:
    """store_row(arguments, head, top, weight_sum, values, out): divide by the sum of the weights, round and store.

    `top` is the maximum of the row's scores (base 2); `values` are Dv weighted values in float32, padded to a multiple of 16. A
    row without keys gets zeros.
    """
    store, store_part, size = STORE[dtype], STORE_PART[dtype], NUM_BYTES[dtype]
    full, tail = value_width // 16 * 16, value_width % 16
    has_sink, load_sink = sink_dtype is not None, LOAD_SCALAR[sink_dtype or "f32"]
    log2_e, zero, one = np.float32(LOG2_E), np.float32(0.0), np.float32(1.0)

    @njit
    def store_row(arguments, head, top, weight_sum, values, out):
        factor = one
        if has_sink:
            sink = load_sink(argument(arguments, SINK_LOGITS) + head * argument(arguments, SINK_STRIDE)) * log2_e
            joint = max(top, sink)
            factor = first_lane(exp2(splat(top - joint)))
            weight_sum = weight_sum * factor + first_lane(exp2(splat(sink - joint)))
        inverse = splat(factor / weight_sum if weight_sum > zero else zero)
        for j in range(0, full, 16):
            store(out + j * size, load_f32(values + 4 * j) * inverse)
        if tail:
            store_part(out + full * size, load_f32(values + 4 * full) * inverse, tail)

    return store_row

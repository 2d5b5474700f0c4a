"""Partial results of decoding rows: the attention of one unit of keys, for each query head of a KV head.

A query head's partial result is the sum of its weighted values in float32 and, at the layout's `statistics`, the maximum of its
scores (base 2) and the sum of its weights 2 ** (score - maximum).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from transom_kernels.cpu.simd import exp2, fma, load_f32, load_scalar_f32, splat, store_f32, store_scalar_f32
from transom_kernels.cpu.work import helper
from transom_kernels.paged_attention.cpu.layout import NO_MAXIMUM, AttentionKind, decode_layout
from transom_kernels.paged_attention.cpu.row_result import make_store_row
from transom_kernels.paged_attention.cpu.row_vectors import first_lane


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

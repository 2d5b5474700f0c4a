"""Integer products for decoding over caches of int8 and int4: 16-bit integers are multiplied in pairs, and added in int32.

Stored numbers are widened to 16 bits, which takes one instruction where bfloat16 takes five, and products take half of bfloat16's
time. A query, and the weights of a unit's values, are rounded to 16 bits for it, with a scale of their own: 250 times finer than
the stored numbers that they multiply. No sum overflows: 512 products of a query, or 256 of weights, stay below 2 ** 31.

Legend: D key width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from transom_kernels.cpu.simd import f32x16, lane_max, lane_sum, load_f32, splat, store_scalar_f32, vector_max
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import (
    F32,
    F32_16,
    I16,
    I32_16,
    LANES,
    broadcast,
    constant,
    float32_constant,
    function,
    int64,
    pair_high,
    pair_low,
    shuffle,
    store,
)
from transom_kernels.cpu.vector_code import load as load_vector
from transom_kernels.cpu.work import helper
from transom_kernels.paged_attention.cpu.layout import VECTOR_BYTES, AttentionKind, Words

LARGEST = 32767.0
MAX_WIDTH = 512
_I = types.int64
_I16_16 = ir.VectorType(I16, LANES)


def integer_words(kind: AttentionKind) -> Words | None:
    """How rows of the cache are multiplied by integers; None where they are multiplied as floats, as float32's are."""
    if kind.dtype == "f32":  # 16 bits would round what decoding and prompts must compute alike
        return None
    target = cpu_target()
    if kind.stored not in ("i8", "i4") or kind.width > MAX_WIDTH or not (target.x86 and target.avx2):
        return None
    return Words(kind.stored, pairs=False, halves=True)


def make_round_query(kind: AttentionKind, stride: int) -> Any:
    """round_query(query, out): a query in words of floats as words of integers, and its scale at the end of `stride` bytes."""
    words, width = kind.words, kind.width
    num_words = -(-width // (2 * LANES))

    @intrinsic
    def round_query(typingctx, query, out):
        def emit(context, b, sig, args):
            query, out = args
            rows = _floats_of(b, words, query, width)
            largest, undefined = constant(F32_16, 0.0), constant(F32_16, 0.0)
            for row in rows:
                size = b.call(function(b, f"llvm.fabs.v{LANES}f32", F32_16, [F32_16]), [row])
                largest = b.call(function(b, f"llvm.maxnum.v{LANES}f32", F32_16, [F32_16] * 2), [largest, size])
                undefined = b.fadd(undefined, b.fmul(row, constant(F32_16, 0.0)))  # NaN where a number is not finite
            reduce = function(b, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [F32_16])
            total = function(b, f"llvm.vector.reduce.fadd.v{LANES}f32", F32, [F32, F32_16])
            largest = b.call(reduce, [largest])
            is_tiny = b.fcmp_ordered("<", largest, float32_constant(1e-30))
            inverse = b.select(is_tiny, float32_constant(0.0), b.fdiv(float32_constant(LARGEST), largest))
            scale = b.fmul(largest, float32_constant(1 / LARGEST))
            scale = b.fadd(scale, b.call(total, [float32_constant(0.0), undefined]))
            rint = function(b, f"llvm.rint.v{LANES}f32", F32_16, [F32_16])
            halves = []
            for row in rows:
                integers = b.fptosi(b.call(rint, [b.fmul(row, broadcast(b, inverse, F32_16))]), I32_16)
                halves.append(b.trunc(integers, _I16_16))
            for j in range(num_words):
                both = shuffle(b, halves[2 * j], halves[2 * j + 1], list(range(2 * LANES)))
                store(b, b.bitcast(both, I32_16), b.add(out, int64(VECTOR_BYTES * j)), 64)
            store(b, scale, b.add(out, int64(stride - VECTOR_BYTES)), 4)
            return context.get_dummy_value()

        return types.void(_I, _I), emit

    return round_query


def _floats_of(b, words: Words, query, width: int) -> list[Any]:
    """The numbers of a query in float32, 16 a vector, in their order; an even number of vectors."""
    count = 2 * -(-width // (2 * LANES))
    if not words.pairs:
        present = words.vectors(width)
        rows = [load_vector(b, b.add(query, int64(VECTOR_BYTES * j)), F32_16, 64) for j in range(present)]
        return rows + [constant(F32_16, 0.0)] * (count - present)
    rows = []
    for j in range(count // 2):
        pairs = load_vector(b, b.add(query, int64(VECTOR_BYTES * j)), I32_16, 64)
        low, high = pair_low(b, pairs), pair_high(b, pairs)
        for first in (0, LANES // 2):
            rows.append(shuffle(b, low, high, [lane // 2 + first + LANES * (lane % 2) for lane in range(LANES)]))
    return rows


@intrinsic
def _store_halves(typingctx, address, x):
    """Round 16 numbers and store them as 16-bit integers."""

    def emit(context, b, sig, args):
        address, x = args
        rint = function(b, f"llvm.rint.v{LANES}f32", F32_16, [F32_16])
        store(b, b.trunc(b.fptosi(b.call(rint, [x]), I32_16), _I16_16), address, 2)
        return context.get_dummy_value()

    return types.void(_I, f32x16), emit


def make_round_weights(stride: int) -> Any:
    """round_weights(weights, out, count): weights, none negative, as integers; their scale ends `stride` bytes."""
    largest, zero = np.float32(LARGEST), np.float32(0.0)

    @helper
    def round_weights(weights, out, count):
        top, undefined = splat(zero), splat(zero)
        for k in range(0, count, 16):
            x = load_f32(weights + 4 * k)
            top = vector_max(top, x)
            undefined = undefined + x * splat(zero)
        maximum = lane_max(top)
        inverse = splat(largest / maximum if maximum > np.float32(1e-30) else zero)
        for k in range(0, count, 16):
            _store_halves(out + 2 * k, load_f32(weights + 4 * k) * inverse)
        store_scalar_f32(out + stride - 64, maximum / largest + lane_sum(undefined))

    return round_weights

"""Integer products for decoding over int8 and int4 caches: 16-bit integers are multiplied in pairs and summed in int32.

Widening stored numbers to 16-bit integers takes one instruction (to bfloat16: five), and integer products take half the time of
bfloat16 products. Queries and softmax weights are rounded to 16-bit integers, with a scale for each query and each unit's weights.
That is 250 times finer than the stored numbers that they multiply. Sums do not overflow: 512 products (MAX_WIDTH) of 32767 and at
most 127, or 256 of weights, stay below 2 ** 31.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from transom_kernels.cpu.language import FLOATS, INT, NOTHING, emits
from transom_kernels.cpu.simd import (
    LOAD,
    LOAD_PART,
    NUM_BYTES,
    lane_max,
    lane_sum,
    splat,
    store_scalar_f32,
    vector_abs,
    vector_max,
)
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import F32_16, I16, I32_16, LANES, function, store
from transom_kernels.cpu.work import helper
from transom_kernels.paged_attention.cpu.layout import AttentionKind, Words

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
    load, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]
    largest, tiny, zero = np.float32(LARGEST), np.float32(1e-30), np.float32(0.0)

    @helper
    def round_row(row, count, out):
        full, rest = count // 16 * 16, count % 16
        top, undefined = splat(zero), splat(zero)
        for k in range(0, full, 16):
            x = load(row + k * size)
            top, undefined = vector_max(top, vector_abs(x)), undefined + x * splat(zero)
        if rest:
            x = load_part(row + full * size, rest)
            top, undefined = vector_max(top, vector_abs(x)), undefined + x * splat(zero)
        maximum = lane_max(top)
        inverse = splat(largest / maximum if maximum > tiny else zero)
        for k in range(0, full, 16):
            _store_halves(out + 2 * k, load(row + k * size) * inverse)
        if rest:
            _store_halves(out + 2 * full, load_part(row + full * size, rest) * inverse)
        if (count + 15) // 16 % 2:
            _store_halves(out + 2 * ((count + 15) // 16 * 16), splat(zero))
        store_scalar_f32(out + stride - 64, maximum / largest + lane_sum(undefined))

    return round_row

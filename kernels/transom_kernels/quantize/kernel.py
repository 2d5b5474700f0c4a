"""The Triton kernels `quantize_rows` (to 8 bits with a scale per row) and `dequantize_rows` (back).

scale[t] = max(|x[t]|) / LARGEST;  values[t] = x[t] / scale[t], rounded to nearest;  x[t] is about values[t] * scale[t].

Legend: T rows, N width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.triton_math import round_to_nearest


@triton.jit
def quantize_rows(
    x,  # [T, N]
    values,  # [T, N] int8 or float8
    scales,  # [T] float32
    x_stride,
    N: tl.constexpr,
    LARGEST: tl.constexpr,  # the largest number of the 8-bit format
    TO_INTEGER: tl.constexpr,  # int8, else float8
    BLOCK_N: tl.constexpr,
):
    """Quantise one row. The grid is (T). Values are clamped before the conversion, since integer casts wrap around."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    inside = n < N
    wide = tl.load(x + row * x_stride + n, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), 1e-12) / LARGEST
    scaled = tl.minimum(tl.maximum(wide / scale, -LARGEST), LARGEST)
    if TO_INTEGER:
        scaled = round_to_nearest(scaled)
    tl.store(values + row * N + n, scaled.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def dequantize_rows(values, scales, out, values_stride, N, BLOCK_N: tl.constexpr):
    """Dequantise `BLOCK_N` elements of one row. The grid is (T, blocks of N)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    wide = tl.load(values + row * values_stride + n, mask=inside, other=0.0).to(tl.float32) * tl.load(scales + row)
    tl.store(out + row * N + n, wide.to(out.dtype.element_ty), mask=inside)

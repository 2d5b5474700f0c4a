"""Two grouped products in Triton: into the experts, gates applied, and out of them, routing weights applied.

A program has a block of rows that chose one expert, and a block of columns. MXFP4 weights are widened in registers, the even and
the odd elements of a byte in products of their own.

Legend: P pairs of token and expert, K experts per token; a tile is M rows by N columns, J inner elements a round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.triton_math import gelu_tanh


@triton.jit
def _mx_value(nibble):
    """fp4 as float32: sign, two bits of exponent, one of fraction are put where float32 has them, below normal numbers too."""
    bits = ((nibble & 7) << 22) | ((nibble & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126, what the exponents' biases differ by


@triton.jit
def _power(scale):
    """2 ** (scale - 127) as float32, from its bits; the smallest is below normal numbers, and stays zero."""
    return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _plain_product(
    acc, rows, weight_rows, j0, width, is_row, is_column, factor, UPCAST: tl.constexpr, BLOCK_J: tl.constexpr
):
    """`acc + rows @ weight.T` over elements [j0, j0 + BLOCK_J)."""
    j = j0 + tl.arange(0, BLOCK_J)
    inside = j < width
    a = tl.load(rows + j[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
    b = tl.load(weight_rows + j[None, :], mask=is_column[:, None] & inside[None, :], other=0.0)
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot((a * factor).to(a.dtype), tl.trans(b), acc, input_precision="ieee")


@triton.jit
def _mx_product(
    acc, rows, block_rows, scale_rows, j0, width, is_row, is_column, factor, UPCAST: tl.constexpr, BLOCK_J: tl.constexpr
):
    """The same where weights are MXFP4: 16 bytes and a scale a group, so that a thread loads a group at once."""
    GROUPS: tl.constexpr = BLOCK_J // 32
    group, byte = j0 // 32 + tl.arange(0, GROUPS), tl.arange(0, 16)
    kept = is_column[:, None] & (group < width // 32)[None, :]
    places = block_rows[:, :, None] + (group * 16)[None, :, None] + byte[None, None, :]
    packed = tl.load(places, mask=kept[:, :, None], other=0).to(tl.int32)
    power = _power(tl.load(scale_rows + group[None, :], mask=kept, other=0))[:, :, None]
    j = j0 + tl.arange(0, BLOCK_J)
    a = tl.load(rows + j[None, :], mask=is_row[:, None] & (j < width)[None, :], other=0.0)
    if UPCAST:
        a = a.to(tl.float32)
    even, odd = tl.split(tl.reshape((a * factor).to(a.dtype), [rows.shape[0], BLOCK_J // 2, 2]))
    low = tl.reshape(_mx_value(packed & 15) * power, [block_rows.shape[0], BLOCK_J // 2]).to(a.dtype)
    acc = tl.dot(even, tl.trans(low), acc, input_precision="ieee")
    high = tl.reshape(_mx_value(packed >> 4) * power, [block_rows.shape[0], BLOCK_J // 2]).to(a.dtype)
    return tl.dot(odd, tl.trans(high), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_pairs"])
def into_experts(
    x,  # [T, width]
    gate_up,  # [E, 2I, width], or MXFP4 [E, 2I, width / 2]
    scales,  # [E, 2I, width / 32], or unused
    bias,  # [E, 2I], or unused
    weights,  # [P] float32, or unused
    out,  # [P, I]
    pairs,  # [blocks, BLOCK_M] int32: P where there is none
    block_expert,  # [blocks] int32; below 0: nothing to do
    num_pairs,
    width,
    inner,
    x_stride,
    limit,
    gain,
    up_offset,
    NUM_CHOSEN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IS_MX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES_INPUT: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Inner rows of some pairs: one accumulator for gates, one for ups."""
    expert = tl.load(block_expert + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))
    is_row = pair < num_pairs
    rows = x + (pair // NUM_CHOSEN).to(tl.int64)[:, None] * x_stride
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = n < inner
    gate_row = expert * 2 * inner + (2 * n if INTERLEAVED else n)
    up_row = gate_row + (1 if INTERLEAVED else inner)
    factor = tl.full([BLOCK_M, 1], 1.0, tl.float32)
    if SCALES_INPUT:
        factor = tl.load(weights + pair, mask=is_row, other=0.0)[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for j0 in range(0, width, BLOCK_J):
        if IS_MX:
            groups = width // 32
            half = groups * 16  # bytes; said so that rows are known to begin at multiples of 16
            gate = _mx_product(
                gate, rows, gate_up + gate_row[:, None] * half, scales + gate_row[:, None] * groups,
                j0, width, is_row, is_column, factor, UPCAST, BLOCK_J,
            )  # fmt: skip
            up = _mx_product(
                up, rows, gate_up + up_row[:, None] * half, scales + up_row[:, None] * groups,
                j0, width, is_row, is_column, factor, UPCAST, BLOCK_J,
            )  # fmt: skip
        else:
            gate = _plain_product(
                gate, rows, gate_up + gate_row[:, None] * width, j0, width, is_row, is_column, factor, UPCAST, BLOCK_J
            )
            up = _plain_product(
                up, rows, gate_up + up_row[:, None] * width, j0, width, is_row, is_column, factor, UPCAST, BLOCK_J
            )
    if HAS_BIAS:
        gate += tl.load(bias + gate_row, mask=is_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + up_row, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    active = gelu_tanh(gate) if GELU else gate * tl.sigmoid(gain * gate)
    result = active * (up + up_offset)
    place = out + pair.to(tl.int64)[:, None] * inner + n[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def out_of_experts(
    x,  # [P, width] inner rows
    down,  # [E, columns, width], or MXFP4
    scales,
    bias,  # [E, columns], or unused
    weights,  # [P] float32, or unused
    out,  # [P, columns] float32
    pairs,
    block_expert,
    num_pairs,
    width,
    columns,
    IS_MX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES_OUTPUT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """What the experts make of some pairs."""
    expert = tl.load(block_expert + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))
    is_row = pair < num_pairs
    rows = x + pair.to(tl.int64)[:, None] * width
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = n < columns
    row = expert * columns + n
    factor = tl.full([BLOCK_M, 1], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for j0 in range(0, width, BLOCK_J):
        if IS_MX:
            acc = _mx_product(
                acc, rows, down + row[:, None] * (width // 32 * 16), scales + row[:, None] * (width // 32),
                j0, width, is_row, is_column, factor, UPCAST, BLOCK_J,
            )  # fmt: skip
        else:
            acc = _plain_product(
                acc, rows, down + row[:, None] * width, j0, width, is_row, is_column, factor, UPCAST, BLOCK_J
            )
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if SCALES_OUTPUT:
        acc *= tl.load(weights + pair, mask=is_row, other=0.0)[:, None]
    place = out + pair.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, acc, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def add_up(parts, out, columns, NUM_CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr):
    """A token's experts in the order in which it chose them, so that sums do not depend on the batch."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < columns
    total = tl.zeros([BLOCK_N], tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        total += tl.load(parts + (token * NUM_CHOSEN + choice) * columns + n, mask=inside, other=0.0)
    tl.store(out + token * columns + n, total.to(out.dtype.element_ty), mask=inside)

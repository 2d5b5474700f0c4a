"""The Triton kernels of an MoE layer: the grouped matmuls `into_experts` and `out_of_experts`, and `sum_experts`.

    into_experts:    inner[p] = act(gate) * (up + up_offset),  [gate, up] = gate_up[expert of p] @ x[token of p] + bias
    out_of_experts:  result[p] = weights[p] * (down[expert of p] @ inner[p] + bias)
    sum_experts:     out[t] = sum of result[p] over the K pairs p of token t

With SCALES_INPUT (Llama 4) weights[p] multiplies x instead of the result. The grid of a matmul is (column blocks, row blocks). One
program multiplies one row block (pairs that chose one expert, `row_blocks.py`) by one block of columns of that expert's matrix.

MXFP4 weights are dequantised in registers. A byte holds an even and the next odd element, so even and odd columns are multiplied
separately.

Legend: T tokens, P pairs of token and expert, K experts per token, E experts, I inner width; a tile is M rows by N columns, and an
iteration multiplies J inner elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.triton_math import gelu_tanh


@triton.jit
def _mx_value(nibble):
    """Return fp4 (one sign, two exponent, one fraction bit) as float32: its bits move to float32's places.

    Multiplying by the difference of the exponents' biases is right for subnormal numbers, too.
    """
    bits = ((nibble & 7) << 22) | ((nibble & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126: float32's exponent bias minus fp4's


@triton.jit
def _power_of_two(scale):
    """Return 2 ** (scale - 127) as float32, from its bits. Scale 0 gives zero: 2 ** -127 is below float32's normal numbers."""
    return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _plain_product(
    acc, rows, weight_rows, begin, width, is_row, is_column, factor, UPCAST: tl.constexpr, BLOCK_J: tl.constexpr
):
    """Return `acc + (rows * factor) @ weight.T` [BLOCK_M, BLOCK_N] over the inner elements [begin, begin + BLOCK_J)."""
    j = begin + tl.arange(0, BLOCK_J)
    inside = j < width
    a = tl.load(rows + j[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
    b = tl.load(weight_rows + j[None, :], mask=is_column[:, None] & inside[None, :], other=0.0)
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot((a * factor).to(a.dtype), tl.trans(b), acc, input_precision="ieee")


@triton.jit
def _mx_product(
    acc,
    rows,
    block_rows,
    scale_rows,
    begin,
    width,
    is_row,
    is_column,
    factor,
    UPCAST: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Return what `_plain_product` returns, for MXFP4 weights. A thread loads whole groups: 16 bytes and their scale."""
    GROUPS: tl.constexpr = BLOCK_J // 32
    group, byte = begin // 32 + tl.arange(0, GROUPS), tl.arange(0, 16)
    kept = is_column[:, None] & (group < width // 32)[None, :]
    places = block_rows[:, :, None] + (group * 16)[None, :, None] + byte[None, None, :]
    packed = tl.load(places, mask=kept[:, :, None], other=0).to(tl.int32)
    power = _power_of_two(tl.load(scale_rows + group[None, :], mask=kept, other=0))[:, :, None]
    j = begin + tl.arange(0, BLOCK_J)
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
    weights,  # [P] float32 routing weights, or unused
    out,  # [P, I]
    pairs,  # [blocks, BLOCK_M] int32: pairs of each row block; P is padding
    block_expert,  # [blocks] int32; below 0: the block is empty
    num_pairs,
    width,
    inner,  # I
    x_stride,
    limit,  # this and the next two are fields of `GateRule`
    gain,
    up_offset,
    NUM_CHOSEN: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # rows of gate_up are gate, up, gate, up ..., not all gates first
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
    """Compute one tile of `inner` (formula above), with one accumulator for gates and one for ups."""
    # the row block's expert and its rows
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
    # loop over inner elements
    for begin in range(0, width, BLOCK_J):
        if IS_MX:
            groups = width // 32
            # bytes of a row, written as a product with 16 so that the compiler knows that rows begin at multiples of 16
            half = groups * 16
            gate = _mx_product(
                gate, rows, gate_up + gate_row[:, None] * half, scales + gate_row[:, None] * groups,
                begin, width, is_row, is_column, factor, UPCAST, BLOCK_J,
            )  # fmt: skip
            up = _mx_product(
                up, rows, gate_up + up_row[:, None] * half, scales + up_row[:, None] * groups,
                begin, width, is_row, is_column, factor, UPCAST, BLOCK_J,
            )  # fmt: skip
        else:
            gate = _plain_product(
                gate, rows, gate_up + gate_row[:, None] * width,
                begin, width, is_row, is_column, factor, UPCAST, BLOCK_J,
            )  # fmt: skip
            up = _plain_product(
                up, rows, gate_up + up_row[:, None] * width,
                begin, width, is_row, is_column, factor, UPCAST, BLOCK_J,
            )  # fmt: skip
    # bias, clamp, activation
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
    scales,  # [E, columns, width / 32], or unused
    bias,  # [E, columns], or unused
    weights,  # [P] float32 routing weights, or unused
    out,  # [P, columns] float32
    pairs,  # [blocks, BLOCK_M] int32, as for `into_experts`
    block_expert,  # [blocks] int32
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
    """Compute one tile of the experts' results (formula above)."""
    # the row block's expert and its rows
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
    # loop over inner elements
    for begin in range(0, width, BLOCK_J):
        if IS_MX:
            acc = _mx_product(
                acc, rows, down + row[:, None] * (width // 32 * 16), scales + row[:, None] * (width // 32),
                begin, width, is_row, is_column, factor, UPCAST, BLOCK_J,
            )  # fmt: skip
        else:
            acc = _plain_product(
                acc, rows, down + row[:, None] * width, begin, width, is_row, is_column, factor, UPCAST, BLOCK_J
            )
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if SCALES_OUTPUT:
        acc *= tl.load(weights + pair, mask=is_row, other=0.0)[:, None]
    place = out + pair.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(place, acc, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def sum_experts(results, out, columns, NUM_CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum `BLOCK_N` columns of one token's results, in the order of its experts, so that sums do not depend on the batch."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < columns
    total = tl.zeros([BLOCK_N], tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        total += tl.load(results + (token * NUM_CHOSEN + choice) * columns + n, mask=inside, other=0.0)
    tl.store(out + token * columns + n, total.to(out.dtype.element_ty), mask=inside)

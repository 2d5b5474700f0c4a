"""The Triton kernels of an MoE layer: the grouped matmuls `into_experts` and `out_of_experts`, and `sum_experts`.

    into_experts:    inner[p] = act(gate) * (up + up_offset),  [gate, up] = gate_up[expert of p] @ x[token of p] + bias; or
                     inner[p] = relu(up) ** 2 of ups alone
    out_of_experts:  result[p] = weights[p] * (down[expert of p] @ inner[p] + bias)
    sum_experts:     out[t] = sum of result[p] over the K pairs p of token t

With SCALES_INPUT (Llama 4) weights[p] multiplies x instead of the result. The grid of a matmul is (blocks of the matrix's rows, row
blocks). One program multiplies a block of rows of one expert's matrix by one row block (pairs that chose the expert,
`row_blocks.py`). The weights are the left operand, which tensor cores take from registers: quantised weights are widened there, and
never written to shared memory. A linear layer over a quantised weight is `out_of_experts` with one expert.

Legend: T tokens, P pairs of token and expert, K experts per token, E experts, I inner width; a tile is N rows of a matrix by M
pairs, and an iteration multiplies J inner elements.
"""

import triton
import triton.language as tl

from transom_kernels.moe.widening import TWO_TO_32, factors_of, of_groups, widened
from transom_kernels.triton_math import gelu_tanh, relu2


@triton.jit
def _product(
    rows,  # [BLOCK_M, 1] pointers
    is_row,
    weight,  # [E, num_rows, width], or words of a quantised weight
    scales,
    zeros,
    row_scales,
    expert,
    row,  # [BLOCK_N] of the expert's matrix
    num_rows,
    width,
    NUMBERS: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Return `weight[expert, row] @ rows.T` [BLOCK_N, BLOCK_M].

    Quantised weights are read without masks, which cost instructions: those beyond a row's end are its last ones, times zeros of x.
    """
    acc = tl.zeros([BLOCK_N, rows.shape[0]], tl.float32)
    groups, blocks = tl.cdiv(width, 32), tl.cdiv(num_rows, 16)
    block = tl.minimum(tl.program_id(0) * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16), blocks - 1)
    # products with powers of two tell the compiler that rows begin at such multiples
    WORDS: tl.constexpr = 16 if NUMBERS == "int8" or NUMBERS == "fp8" else 8
    words, chunks = groups * WORDS, tl.cdiv(width, 128)
    word_rows = weight + expert * num_rows * words + (row * words)[:, None, None]
    first_chunk = (expert * blocks + block)[:, None, None] * chunks
    for begin in range(0, width, BLOCK_J):
        j = begin + tl.arange(0, BLOCK_J)
        inside = (j < width)[None, :]
        if rows.shape[0] < 64:  # most rows of a block may be padding: they are not read; later, reading them is faster
            inside &= is_row[:, None]
        a = tl.load(rows + j[None, :], mask=inside, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
        if NUMBERS != "":
            group = tl.minimum(begin // 32 + tl.arange(0, BLOCK_J // 32), groups - 1)
            chunk = tl.minimum(begin // 128 + tl.arange(0, BLOCK_J // 128), chunks - 1)
            packed = tl.load(word_rows + (group * WORDS)[None, :, None] + tl.arange(0, WORDS)[None, None, :])
            if SCALES != "":
                factors = factors_of(of_groups(scales, first_chunk, chunk[None, :, None], GROUP), SCALES, UPCAST)
            else:
                factor = 2.0**94 if NUMBERS == "fp4" else 2.0**88 if NUMBERS == "fp8" else 2.0**101
                factors = tl.full([BLOCK_N, BLOCK_J // GROUP], factor, tl.float32 if UPCAST else tl.bfloat16)
            points = 128 if NUMBERS == "int8" else 8
            if HAS_ZEROS:
                points = of_groups(zeros, first_chunk, chunk[None, :, None], GROUP).to(tl.int16)
            b = widened(packed, factors, points, NUMBERS, HAS_ZEROS, GROUP, IS_SPREAD, UPCAST, BLOCK_N, BLOCK_J)
            if a.dtype != tl.bfloat16:
                b = (b.to(tl.float32) * TWO_TO_32).to(a.dtype)
        else:
            weights = weight + expert * num_rows * width + row[:, None] * width + j[None, :]
            b = tl.load(weights, mask=(j < width)[None, :], other=0.0).to(a.dtype)
        acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
    if NUMBERS != "" and rows.dtype.element_ty == tl.bfloat16 and not UPCAST:
        acc *= TWO_TO_32
    if HAS_ROW_SCALES:
        acc *= tl.load(row_scales + expert * num_rows + row)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_pairs"])
def into_experts(
    x,  # [T, width]
    gate_up,  # [E, 2I, width], or with relu2 [E, I, width], or words of a `GpuMatrix`
    scales,  # this and the next two are the quantised matrix's, or unused
    zeros,
    row_scales,
    bias,  # [E, 2I], or unused
    weights,  # [P] float32 routing weights, or unused
    out,  # [P, I]
    pairs,  # [blocks, BLOCK_M] int32: pairs of each row block; P is padding
    block_expert,  # [blocks] int32; below 0: the block is empty
    num_pairs,
    width,
    inner,  # I
    x_stride,
    gate_limit,  # this and the next three are fields of `GateRule`
    up_limit,
    gain,
    up_offset,
    NUM_CHOSEN: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # rows of gate_up are gate, up, gate, up ..., not all gates first
    NUMBERS: tl.constexpr,  # this and the next five describe a quantised matrix (`GpuMatrix`)
    SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES_INPUT: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Compute one tile of `inner` (formula above) from BLOCK_N rows of gate_up, alternating gates and ups or ups alone."""
    # the row block's expert and its rows
    expert = tl.load(block_expert + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))
    is_row = pair < num_pairs
    rows = x + (tl.minimum(pair, num_pairs - 1) // NUM_CHOSEN).to(tl.int64)[:, None] * x_stride
    num_rows = inner if ACTIVATION == "relu2" else 2 * inner
    row = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), num_rows - 1)
    if not INTERLEAVED and ACTIVATION != "relu2":
        row = row % 2 * inner + row // 2
    both = _product(
        *(rows, is_row, gate_up, scales, zeros, row_scales, expert, row, num_rows, width, NUMBERS, SCALES, HAS_ZEROS),
        *(HAS_ROW_SCALES, GROUP, IS_SPREAD, UPCAST, BLOCK_N, BLOCK_J),
    )
    # factor, bias, clamp, activation; pairs are read again, since registers are scarce in the loop
    pair = tl.load(pairs + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), volatile=True)
    is_row = pair < num_pairs
    if SCALES_INPUT:
        both *= tl.load(weights + pair, mask=is_row, other=0.0)[None, :]
    if HAS_BIAS:
        both += tl.load(bias + expert * num_rows + row).to(tl.float32)[:, None]
    if ACTIVATION == "relu2":
        result = relu2(both)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(both, [BLOCK_N // 2, 2, BLOCK_M]), [0, 2, 1]))
        if HAS_LIMITS:
            gate = tl.minimum(gate, gate_limit)
            up = tl.minimum(tl.maximum(up, -up_limit), up_limit)
        active = gelu_tanh(gate) if ACTIVATION == "gelu_tanh" else gate * tl.sigmoid(gain * gate)
        result = active * (up + up_offset)
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    place = out + pair.to(tl.int64)[None, :] * inner + n[:, None]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_row[None, :] & (n < inner)[:, None])


@triton.jit(do_not_specialize=["num_pairs"])
def out_of_experts(
    x,  # [P, width] inner rows
    down,  # [E, columns, width], or words of a `GpuMatrix`
    scales,  # this and the next two are the quantised matrix's, or unused
    zeros,
    row_scales,
    bias,  # [E, columns], or unused
    weights,  # [P] float32 routing weights, or unused
    out,  # [P, columns]
    pairs,  # [blocks, BLOCK_M] int32, as for `into_experts`; unused in a dense layer
    block_expert,  # [blocks] int32
    num_pairs,
    width,
    columns,
    x_stride,
    IS_DENSE: tl.constexpr,  # one expert has all rows, as a linear layer does
    NUMBERS: tl.constexpr,  # this and the next five are as for `into_experts`
    SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES_OUTPUT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Compute one tile of the experts' results (formula above)."""
    # the row block's expert and its rows
    place = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if IS_DENSE:
        expert, pair = tl.cast(0, tl.int64), place
    else:
        expert, pair = tl.load(block_expert + tl.program_id(1)).to(tl.int64), tl.load(pairs + place)
        if expert < 0:
            return
    is_row = pair < num_pairs
    rows = x + tl.minimum(pair, num_pairs - 1).to(tl.int64)[:, None] * x_stride
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, columns - 1)
    acc = _product(
        *(rows, is_row, down, scales, zeros, row_scales, expert, row, columns, width, NUMBERS, SCALES, HAS_ZEROS),
        *(HAS_ROW_SCALES, GROUP, IS_SPREAD, UPCAST, BLOCK_N, BLOCK_J),
    )
    if not IS_DENSE:  # again, and `volatile` so that it is: over the product they would take registers
        pair = tl.load(pairs + place, volatile=True)
        is_row = pair < num_pairs
    if HAS_BIAS:
        acc += tl.load(bias + expert * columns + row).to(tl.float32)[:, None]
    if SCALES_OUTPUT:
        acc *= tl.load(weights + pair, mask=is_row, other=0.0)[None, :]
    outputs = out + pair.to(tl.int64)[None, :] * columns + n[:, None]
    tl.store(outputs, acc.to(out.dtype.element_ty), mask=is_row[None, :] & (n < columns)[:, None])


@triton.jit
def sum_experts(results, out, columns, NUM_CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum `BLOCK_N` columns of one token's results, in the order of its experts, so that sums do not depend on the batch."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < columns
    total = tl.zeros([BLOCK_N], tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        result = tl.load(results + (token * NUM_CHOSEN + choice) * columns + n, mask=inside, other=0.0)
        total += result.to(tl.float32)
    tl.store(out + token * columns + n, total.to(out.dtype.element_ty), mask=inside)

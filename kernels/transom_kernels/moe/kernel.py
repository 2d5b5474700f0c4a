"""The Triton kernels of an MoE layer: the grouped matmuls `into_experts` and `out_of_experts`, and `sum_experts`.

    into_experts:    inner[p] = act(gate) * (up + up_offset),  [gate, up] = gate_up[expert of p] @ x[token of p] + bias
    out_of_experts:  result[p] = weights[p] * (down[expert of p] @ inner[p] + bias)
    sum_experts:     out[t] = sum of result[p] over the K pairs p of token t

With SCALES_INPUT (Llama 4) weights[p] multiplies x instead of the result. The grid of a matmul is (blocks of the matrix's rows, row
blocks). One program multiplies a block of rows of one expert's matrix by one row block (pairs that chose the expert,
`row_blocks.py`). The weights are the left operand, which tensor cores take from registers: MXFP4 weights are widened there, and
never written to shared memory.

Legend: T tokens, P pairs of token and expert, K experts per token, E experts, I inner width; a tile is N rows of a matrix by M
pairs, and an iteration multiplies J inner elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.triton_math import gelu_tanh

# MXFP4 weights are multiplied times 2 ** -32, so that the factors of scales up to 2 ** 33 are bfloat16 numbers.
TWO_TO_32 = tl.constexpr(2.0**32)
# `gpu_weights.widened_words` of two words ($4), times the factor of their scale ($5); prmt swaps the bytes of each word
WIDEN_WORDS = tl.constexpr("""{
.reg .b32 bits, swapped, zero;
mov.b32 zero, 0;
and.b32 bits, $4, 0x81C081C0; fma.rn.bf16x2 $0, bits, $5, zero;
shl.b32 bits, $4, 4; and.b32 bits, bits, 0x81C081C0; fma.rn.bf16x2 $1, bits, $5, zero;
prmt.b32 swapped, $4, 0, 0x2301;
shl.b32 bits, swapped, 2; xor.b32 bits, bits, swapped; and.b32 bits, bits, 0x81C081C0; fma.rn.bf16x2 $2, bits, $5, zero;
shl.b32 bits, swapped, 6; xor.b32 bits, bits, swapped; and.b32 bits, bits, 0x81C081C0; fma.rn.bf16x2 $3, bits, $5, zero;
}""")
# The factors 2 ** (scale - 33) of four scales ($2) as bfloat16 numbers: the exponents' bits are scale + 94
SCALE_FACTORS = tl.constexpr("""{
.reg .b32 pair;
prmt.b32 pair, $2, 0, 0x4140; mad.lo.u32 $0, pair, 128, 0x2F002F00;
prmt.b32 pair, $2, 0, 0x4342; mad.lo.u32 $1, pair, 128, 0x2F002F00;
}""")


@triton.jit
def _widened(words, scales, UPCAST: tl.constexpr, IS_SPREAD: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr):
    """Return weights times 2 ** -32 [N, 32 GROUPS]: bfloat16, or with UPCAST float32, without a GPU's instructions.

    `words` are [N, GROUPS, 8] and `scales` [N / 16, GROUPS / 4, 64], as `gpu_weights.py` describes them.
    """
    words = tl.reshape(words, [N, GROUPS, 4, 2])
    scales = tl.permute(tl.reshape(scales, [N // 16, GROUPS // 4, 8, 4, 2]), [0, 4, 2, 1, 3])
    scales = tl.reshape(scales, [N, GROUPS, 1, 1])
    if UPCAST:
        words = words.to(tl.int32) & 0xFFFF
        swapped = (words << 8) | (words >> 8)
        a, b, c, d = words, words << 4, swapped ^ (swapped << 2), swapped ^ (swapped << 6)
    else:
        factors = tl.inline_asm_elementwise(SCALE_FACTORS, "=r,=r,r", [scales], tl.bfloat16, is_pure=True, pack=4)
        both = [words, tl.broadcast_to(factors, [N, GROUPS, 4, 2])]
        a, b, c, d = tl.inline_asm_elementwise(
            WIDEN_WORDS, "=r,=r,=r,=r,r,r", both, dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
        )
    elements = tl.join(tl.join(a, c), tl.join(b, d))  # [N, GROUPS, q, b, e / 2, e % 2], of which a row's order is made
    if UPCAST:  # a bfloat16 is the upper half of a float32
        factors = ((scales.to(tl.int32) + 94) << 23).to(tl.float32, bitcast=True)
        elements = ((elements & 0x81C0) << 16).to(tl.float32, bitcast=True) * factors[:, :, :, :, None, None]
    elements = tl.permute(elements, [0, 1, 4, 5, 2, 3] if IS_SPREAD else [0, 1, 2, 4, 5, 3])
    return tl.reshape(elements, [N, 32 * GROUPS])


@triton.jit
def _product(
    rows,  # [BLOCK_M, 1] pointers
    is_row,
    weight,  # [E, num_rows, width], or in MXFP4 [E, num_rows, width / 4]
    scales,
    expert,
    row,  # [BLOCK_N] of the expert's matrix
    num_rows,
    width,
    IS_MX: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Return `weight[expert, row] @ rows.T` [BLOCK_N, BLOCK_M].

    MXFP4 weights are read without masks, which cost instructions: those beyond a row's end are its last ones, times zeros of x.
    """
    acc = tl.zeros([BLOCK_N, rows.shape[0]], tl.float32)
    groups, blocks = width // 32, tl.cdiv(num_rows, 16)
    block = tl.minimum(tl.program_id(0) * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16), blocks - 1)
    # products with powers of two tell the compiler that rows begin at such multiples
    words, chunks = groups * 8, tl.cdiv(groups, 4)
    word_rows = weight + expert * num_rows * words + (row * words)[:, None, None]
    scale_blocks = scales + expert * blocks * (chunks * 64) + (block * (chunks * 64))[:, None, None]
    for begin in range(0, width, BLOCK_J):
        j = begin + tl.arange(0, BLOCK_J)
        inside = (j < width)[None, :]
        if rows.shape[0] < 64:  # most rows of a block may be padding: they are not read; later, reading them is faster
            inside &= is_row[:, None]
        a = tl.load(rows + j[None, :], mask=inside, other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
        if IS_MX:
            group = tl.minimum(begin // 32 + tl.arange(0, BLOCK_J // 32), groups - 1)
            chunk = tl.minimum(begin // 128 + tl.arange(0, BLOCK_J // 128), chunks - 1)
            packed = tl.load(word_rows + (group * 8)[None, :, None] + tl.arange(0, 8)[None, None, :])
            packed_scales = tl.load(scale_blocks + (chunk * 64)[None, :, None] + tl.arange(0, 64)[None, None, :])
            b = _widened(packed, packed_scales, UPCAST, IS_SPREAD, BLOCK_N, BLOCK_J // 32)
            if a.dtype != tl.bfloat16:
                b = (b.to(tl.float32) * TWO_TO_32).to(a.dtype)
        else:
            weights = weight + expert * num_rows * width + row[:, None] * width + j[None, :]
            b = tl.load(weights, mask=(j < width)[None, :], other=0.0).to(a.dtype)
        acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
    if IS_MX and rows.dtype.element_ty == tl.bfloat16 and not UPCAST:
        acc *= TWO_TO_32
    return acc


@triton.jit(do_not_specialize=["num_pairs"])
def into_experts(
    x,  # [T, width]
    gate_up,  # [E, 2I, width], or elements of MXFP4, arranged for GPUs
    scales,  # of MXFP4, or unused
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
    IS_SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES_INPUT: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Compute one tile of `inner` (formula above) from BLOCK_N rows of gate_up, in which gates and ups alternate."""
    # the row block's expert and its rows
    expert = tl.load(block_expert + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))
    is_row = pair < num_pairs
    rows = x + (tl.minimum(pair, num_pairs - 1) // NUM_CHOSEN).to(tl.int64)[:, None] * x_stride
    row = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), 2 * inner - 1)
    if not INTERLEAVED:
        row = row % 2 * inner + row // 2
    both = _product(
        rows, is_row, gate_up, scales, expert, row, 2 * inner, width, IS_MX, IS_SPREAD, UPCAST, BLOCK_N, BLOCK_J
    )
    # factor, bias, clamp, activation; pairs are read again, since registers are scarce in the loop
    pair = tl.load(pairs + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), volatile=True)
    is_row = pair < num_pairs
    if SCALES_INPUT:
        both *= tl.load(weights + pair, mask=is_row, other=0.0)[None, :]
    if HAS_BIAS:
        both += tl.load(bias + expert * 2 * inner + row).to(tl.float32)[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(both, [BLOCK_N // 2, 2, BLOCK_M]), [0, 2, 1]))
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    active = gelu_tanh(gate) if GELU else gate * tl.sigmoid(gain * gate)
    result = active * (up + up_offset)
    n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    place = out + pair.to(tl.int64)[None, :] * inner + n[:, None]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_row[None, :] & (n < inner)[:, None])


@triton.jit(do_not_specialize=["num_pairs"])
def out_of_experts(
    x,  # [P, width] inner rows
    down,  # [E, columns, width], or elements of MXFP4, arranged for GPUs
    scales,  # of MXFP4, or unused
    bias,  # [E, columns], or unused
    weights,  # [P] float32 routing weights, or unused
    out,  # [P, columns]
    pairs,  # [blocks, BLOCK_M] int32, as for `into_experts`
    block_expert,  # [blocks] int32
    num_pairs,
    width,
    columns,
    IS_MX: tl.constexpr,
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
    expert = tl.load(block_expert + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))
    is_row = pair < num_pairs
    rows = x + tl.minimum(pair, num_pairs - 1).to(tl.int64)[:, None] * width
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, columns - 1)
    acc = _product(rows, is_row, down, scales, expert, row, columns, width, IS_MX, IS_SPREAD, UPCAST, BLOCK_N, BLOCK_J)
    if HAS_BIAS:
        acc += tl.load(bias + expert * columns + row).to(tl.float32)[:, None]
    if SCALES_OUTPUT:
        acc *= tl.load(weights + pair, mask=is_row, other=0.0)[None, :]
    place = out + pair.to(tl.int64)[None, :] * columns + n[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=is_row[None, :] & (n < columns)[:, None])


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

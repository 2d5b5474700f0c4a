"""Triton functions that widen quantised weights in registers: to bfloat16 numbers, by few instructions for two at a time.

    weight = (number - zero point) * scale

`gpu_weights.py` describes how numbers, scales and zero points are stored. Without a GPU's instructions (UPCAST) the same is
computed in float32.

Legend: a tile is N rows by J columns; `groups` of columns have a scale and a zero point; a thread q of four that multiply a row has
words b of a group, with elements e.
"""

import triton
import triton.language as tl

# Quantised weights are multiplied times 2 ** -32, so that the factors of large scales are bfloat16 numbers.
TWO_TO_32 = tl.constexpr(2.0**32)
# `gpu_weights.widened_words` of two words ($4), times the factors of their first ($5) and last 16 columns ($6); prmt swaps the
# bytes of each word
WIDEN_FP4 = tl.constexpr("""{
.reg .b32 bits, swapped, zero;
mov.b32 zero, 0;
and.b32 bits, $4, 0x81C081C0; fma.rn.bf16x2 $0, bits, $5, zero;
shl.b32 bits, $4, 4; and.b32 bits, bits, 0x81C081C0; fma.rn.bf16x2 $1, bits, $5, zero;
prmt.b32 swapped, $4, 0, 0x2301;
shl.b32 bits, swapped, 2; xor.b32 bits, bits, swapped; and.b32 bits, bits, 0x81C081C0; fma.rn.bf16x2 $2, bits, $6, zero;
shl.b32 bits, swapped, 6; xor.b32 bits, bits, swapped; and.b32 bits, bits, 0x81C081C0; fma.rn.bf16x2 $3, bits, $6, zero;
}""")
# Four integers of each of two words ($4), times factors ($5). Bits 0 to 7 are a bfloat16 number of their value times 2 ** -133,
# below the normal ones and above; so those in bits 4 to 7 count 16 times. The middle integer is subtracted with the product,
# exactly: 8 * 2 ** -133 times a factor has the bits of the factor with another exponent. A zero point ($6) is subtracted before.
WIDEN_INT4 = tl.constexpr("""{
.reg .b32 bits, high, factor, middle;
sub.u32 factor, $5, 0x02000200; add.u32 middle, $5, 0x3F003F00; shr.u32 high, $4, 8;
and.b32 bits, $4, 0x000F000F; fma.rn.bf16x2 $0, bits, $5, middle;
and.b32 bits, $4, 0x00F000F0; fma.rn.bf16x2 $1, bits, factor, middle;
and.b32 bits, high, 0x000F000F; fma.rn.bf16x2 $2, bits, $5, middle;
and.b32 bits, high, 0x00F000F0; fma.rn.bf16x2 $3, bits, factor, middle;
}""")
WIDEN_INT4_ZEROS = tl.constexpr("""{
.reg .b32 bits, high, factor, point, zero, minus;
mov.b32 zero, 0; mov.b32 minus, 0xBF80BF80;
sub.u32 factor, $5, 0x02000200; shl.b32 point, $6, 4; shr.u32 high, $4, 8;
and.b32 bits, $4, 0x000F000F; fma.rn.bf16x2 bits, $6, minus, bits; fma.rn.bf16x2 $0, bits, $5, zero;
and.b32 bits, $4, 0x00F000F0; fma.rn.bf16x2 bits, point, minus, bits; fma.rn.bf16x2 $1, bits, factor, zero;
and.b32 bits, high, 0x000F000F; fma.rn.bf16x2 bits, $6, minus, bits; fma.rn.bf16x2 $2, bits, $5, zero;
and.b32 bits, high, 0x00F000F0; fma.rn.bf16x2 bits, point, minus, bits; fma.rn.bf16x2 $3, bits, factor, zero;
}""")
WIDEN_INT8 = tl.constexpr("""{
.reg .b32 bits, middle;
add.u32 middle, $3, 0x41004100;
and.b32 bits, $2, 0x00FF00FF; fma.rn.bf16x2 $0, bits, $3, middle;
shr.u32 bits, $2, 8; and.b32 bits, bits, 0x00FF00FF; fma.rn.bf16x2 $1, bits, $3, middle;
}""")
WIDEN_INT8_ZEROS = tl.constexpr("""{
.reg .b32 bits, zero, minus;
mov.b32 zero, 0; mov.b32 minus, 0xBF80BF80;
and.b32 bits, $2, 0x00FF00FF; fma.rn.bf16x2 bits, $4, minus, bits; fma.rn.bf16x2 $0, bits, $3, zero;
shr.u32 bits, $2, 8; and.b32 bits, bits, 0x00FF00FF; fma.rn.bf16x2 bits, $4, minus, bits; fma.rn.bf16x2 $1, bits, $3, zero;
}""")
# Two fp8 numbers of each of two words ($2) times factors ($3): sign, and seven bits behind three zeros
WIDEN_FP8 = tl.constexpr("""{
.reg .b32 bits, sign, low, zero;
mov.b32 zero, 0; shl.b32 low, $2, 8;
and.b32 sign, low, 0x80008000; shr.u32 bits, low, 4; and.b32 bits, bits, 0x07F007F0; or.b32 bits, bits, sign;
fma.rn.bf16x2 $0, bits, $3, zero;
and.b32 sign, $2, 0x80008000; shr.u32 bits, $2, 4; and.b32 bits, bits, 0x07F007F0; or.b32 bits, bits, sign;
fma.rn.bf16x2 $1, bits, $3, zero;
}""")
# The factors of four scales of a byte ($2) as bfloat16 numbers. Of powers of two 2 ** (scale - 127), 2 ** (scale - 33): the
# exponents' bits are scale + 94; of scales with five bits of exponent and three of fraction, 2 ** 94 times the scale.
POWER_FACTORS = tl.constexpr("""{
.reg .b32 pair;
prmt.b32 pair, $2, 0, 0x4140; mad.lo.u32 $0, pair, 128, 0x2F002F00;
prmt.b32 pair, $2, 0, 0x4342; mad.lo.u32 $1, pair, 128, 0x2F002F00;
}""")
SMALL_FACTORS = tl.constexpr(POWER_FACTORS.value.replace("128, 0x2F002F00", "16, 0x69806980"))


@triton.jit
def of_groups(pointer, block, chunk, GROUP: tl.constexpr):
    """Load what groups of a tile have, its scales or zero points, as `gpu_weights.py` describes them: [N, J / GROUP].

    `block` [N / 16, 1, 1] and `chunk` [1, J / 128, 1] are the places of the tile's 16 rows and 128 columns. Numbers of 16 bits are
    loaded two at a time, since asynchronous copies have at least four bytes.
    """
    EACH: tl.constexpr = 128 // GROUP
    N: tl.constexpr = block.shape[0] * 16
    CHUNKS: tl.constexpr = chunk.shape[1]
    if pointer.dtype.element_ty == tl.int32:
        pairs = tl.load(pointer + (block + chunk) * (8 * EACH) + tl.arange(0, 8 * EACH)[None, None, :])
        tile = tl.join((pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16))
    else:
        tile = tl.load(pointer + (block + chunk) * (16 * EACH) + tl.arange(0, 16 * EACH)[None, None, :])
    tile = tl.permute(tl.reshape(tile, [N // 16, CHUNKS, 8, EACH, 2]), [0, 4, 2, 1, 3])
    return tl.reshape(tile, [N, CHUNKS * EACH])


@triton.jit
def factors_of(scales, SCALES: tl.constexpr, UPCAST: tl.constexpr):
    """Return the factors of scales: bfloat16, or with UPCAST float32, without a GPU's instructions."""
    if UPCAST:  # a bfloat16 is the upper half of a float32
        bits = scales.to(tl.int32)
        bits = bits * 128 + 0x2F00 if SCALES == "powers" else bits * 16 + 0x6980 if SCALES == "small" else bits
        return (bits << 16).to(tl.float32, bitcast=True)
    if SCALES == "bfloat16":
        return scales.to(tl.bfloat16, bitcast=True)
    CODE: tl.constexpr = POWER_FACTORS if SCALES == "powers" else SMALL_FACTORS
    return tl.inline_asm_elementwise(CODE, "=r,=r,r", [scales], tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def widened(
    words,  # [N, J / 32, 8 or 16]
    factors,  # [N, J / GROUP]
    zeros,  # [N, J / GROUP] int16, or the middle integer
    NUMBERS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_SPREAD: tl.constexpr,
    UPCAST: tl.constexpr,
    N: tl.constexpr,
    J: tl.constexpr,
):
    """Return weights times 2 ** -32 [N, J]: bfloat16, or with UPCAST float32, without a GPU's instructions."""
    # groups of a tile, groups of 32 columns in each (for 16 columns: 1), threads that share one, and words of a thread there
    HAS_HALVES: tl.constexpr = GROUP == 16 and IS_SPREAD
    GROUPS: tl.constexpr = J // 32 if HAS_HALVES else J // GROUP
    EACH: tl.constexpr = 1 if GROUP < 32 else GROUP // 32
    THREADS: tl.constexpr = 2 if GROUP == 16 and not IS_SPREAD else 4
    IS_BYTE: tl.constexpr = NUMBERS == "int8" or NUMBERS == "fp8"
    words = tl.reshape(words, [N, GROUPS, EACH, THREADS, 4 if IS_BYTE else 2])
    if HAS_HALVES:
        first, second = tl.split(tl.reshape(factors, [N, GROUPS, 2]))
    else:
        first, second = factors, factors
    first, second = tl.reshape(first, [N, GROUPS, 1, 1, 1]), tl.reshape(second, [N, GROUPS, 1, 1, 1])
    zeros = tl.reshape(zeros, [N, GROUPS, 1, 1, 1]) if HAS_ZEROS else zeros
    if UPCAST:
        words = words.to(tl.int32) & 0xFFFF
        if NUMBERS == "fp4":
            swapped = (words << 8) | (words >> 8)
            a, b, c, d = words, words << 4, swapped ^ (swapped << 2), swapped ^ (swapped << 6)
            a, b, c, d = _float(a & 0x81C0), _float(b & 0x81C0), _float(c & 0x81C0), _float(d & 0x81C0)
            a, b, c, d = a * first, b * first, c * second, d * second
        elif NUMBERS == "int4":
            a, b = ((words & 15) - zeros) * 2.0**-133 * first, ((words >> 4 & 15) - zeros) * 2.0**-133 * first
            c, d = ((words >> 8 & 15) - zeros) * 2.0**-133 * first, ((words >> 12) - zeros) * 2.0**-133 * first
        elif NUMBERS == "int8":
            a, c = ((words & 255) - zeros) * 2.0**-133 * first, ((words >> 8) - zeros) * 2.0**-133 * first
        else:
            low = words << 8
            a, c = _float(low & 0x8000 | low >> 4 & 0x7F0), _float(words & 0x8000 | words >> 4 & 0x7F0)
            a, c = a * first, c * first
    else:
        third = zeros if HAS_ZEROS else second
        both = [words, tl.broadcast_to(first, words.shape), tl.broadcast_to(third, words.shape)]
        INT8: tl.constexpr = WIDEN_INT8_ZEROS if HAS_ZEROS else WIDEN_INT8
        INT4: tl.constexpr = WIDEN_INT4_ZEROS if HAS_ZEROS else WIDEN_INT4
        if IS_BYTE:
            CODE_8: tl.constexpr = WIDEN_FP8 if NUMBERS == "fp8" else INT8
            a, c = tl.inline_asm_elementwise(CODE_8, "=r,=r,r,r,r", both, (tl.bfloat16,) * 2, is_pure=True, pack=2)
        else:
            CODE_4: tl.constexpr = WIDEN_FP4 if NUMBERS == "fp4" else INT4
            a, b, c, d = tl.inline_asm_elementwise(
                CODE_4, "=r,=r,=r,=r,r,r,r", both, (tl.bfloat16,) * 4, is_pure=True, pack=2
            )
    if IS_BYTE:  # [N, GROUPS, EACH, q, h, b, e]
        elements = tl.reshape(tl.join(a, c), [N, GROUPS * EACH, THREADS, 2, 2, 2])
        elements = tl.permute(elements, [0, 1, 3, 5, 2, 4] if IS_SPREAD else [0, 1, 2, 3, 5, 4])
    else:  # [N, GROUPS, EACH, q, b, e / 2, e % 2]
        elements = tl.join(tl.join(a, c), tl.join(b, d))
        elements = tl.permute(elements, [0, 1, 2, 5, 6, 3, 4] if IS_SPREAD else [0, 1, 2, 3, 5, 6, 4])
    return tl.reshape(elements, [N, J])


@triton.jit
def _float(bits):
    """Return the numbers whose upper halves are `bits`."""
    return (bits << 16).to(tl.float32, bitcast=True)

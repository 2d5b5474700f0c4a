"""Gumbel noise for CPU kernels, in float64: the noise that `reference.py` defines.

The functions emit the same LLVM operations for scalars and for vectors, so that an id's noise is the same to the bit whether it is
computed alone or in a vector. `negative_log` is within one unit in the last place.

Legend: 8 blocks of 64 ids at once.
"""

import math

from llvmlite import ir

from transom_kernels.cpu.language import DOUBLE, INT, NOTHING, emits
from transom_kernels.cpu.vector_code import F64, I64, broadcast, function, store
from transom_kernels.sample.reference import GOLDEN, MIX_1, MIX_2, NOISE_BLOCK

BLOCKS_AT_ONCE = 8
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
_TWO_52_BITS = 0x4330000000000000
# log(2) in two parts: the first has 33 bits, so that its product with an exponent of up to 20 bits is exact
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# coefficients, highest power first, of log((1 + s) / (1 - s)) / s - 2 as a polynomial in s ** 2, fitted for s up to 0.1716
_LOG_FACTORS = (
    1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
    2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01,
)  # fmt: skip


def _constant(kind: ir.Type, number: float) -> ir.Constant:
    """Return a constant; if `kind` is a vector type, one that has the number in every lane."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _same(like: ir.Value, number: float) -> ir.Constant:
    """Return a constant of the type of `like`."""
    return _constant(like.type, number)


def _floats(like: ir.Value) -> ir.Type:
    return ir.VectorType(F64, like.type.count) if isinstance(like.type, ir.VectorType) else F64


def _integers(like: ir.Value) -> ir.Type:
    return ir.VectorType(I64, like.type.count) if isinstance(like.type, ir.VectorType) else I64


def _multiply_add(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    suffix = f"v{x.type.count}f64" if isinstance(x.type, ir.VectorType) else "f64"
    return b.call(function(b, f"llvm.fma.{suffix}", x.type, [x.type] * 3), [x, y, z])


def emit_mixed(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Emit SplitMix64's finaliser of `value`."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        value = b.mul(b.xor(value, b.lshr(value, _same(value, shift))), _same(value, factor))
    return b.xor(value, b.lshr(value, _same(value, 31)))


def emit_random_bits(b: ir.IRBuilder, key: ir.Value, counter: ir.Value) -> ir.Value:
    """Emit the 64 random bits of each counter."""
    return emit_mixed(b, b.add(key, b.mul(counter, _same(counter, GOLDEN))))


def emit_uniform(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Emit the odd multiple of 2 ** -53 inside (0, 1) that the upper 52 bits give: (bits + 1 / 2) * 2 ** -52."""
    kind = _floats(bits)
    number = b.bitcast(b.or_(b.lshr(bits, _same(bits, 12)), _same(bits, _TWO_52_BITS)), kind)  # 2 ** 52 + the 52 bits
    whole = b.fsub(number, _same(number, 2.0**52))
    return b.fmul(b.fadd(whole, _same(whole, 0.5)), _same(whole, 2.0**-52))


def emit_negative_log(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit -log(x) of normal positive numbers.

    x = 2 ** k * (1 + f), where 1 + f lies between sqrt(1 / 2) and sqrt(2); log(1 + f) comes from a series in s = f / (2 + f).
    """
    bits = b.bitcast(x, _integers(x))
    above = b.sub(bits, _same(bits, _SQRT_HALF_BITS))
    exponent = b.ashr(above, _same(bits, 52))
    f = b.bitcast(b.sub(bits, b.shl(exponent, _same(bits, 52))), x.type)
    f = b.fsub(f, _same(x, 1.0))
    # The exponent as a float: the lowest bit of 2 ** 52 + 2 ** 51 counts 1, so an integer added to its bits is added to the number,
    # which is then subtracted.
    shifted = b.add(exponent, _same(bits, 0x4338000000000000))
    k = b.fsub(b.bitcast(shifted, x.type), _same(x, 6755399441055744.0))
    s = b.fdiv(f, b.fadd(f, _same(x, 2.0)))
    square = b.fmul(s, s)
    total = _same(x, _LOG_FACTORS[0])
    for factor in _LOG_FACTORS[1:]:
        total = _multiply_add(b, total, square, _same(x, factor))
    half = b.fmul(b.fmul(f, f), _same(x, 0.5))
    low = _multiply_add(b, s, _multiply_add(b, total, square, half), b.fmul(k, _same(x, _LN2_LOW)))
    # -(k * ln2_high + (f - (half - low)))
    return b.fsub(b.fsub(b.fsub(half, low), f), b.fmul(k, _same(x, _LN2_HIGH)))


def emit_least_exponential(b: ir.IRBuilder, key: ir.Value, block: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Emit the least exponential variable of each block, and the offset in the block of the id that has it."""
    bits = emit_random_bits(b, key, b.sub(_same(block, -1), block))
    least = b.fmul(emit_negative_log(b, emit_uniform(b, bits)), _constant(_floats(bits), 1.0 / NOISE_BLOCK))
    return least, b.and_(bits, _same(bits, NOISE_BLOCK - 1))


@emits(INT, INT)
def mixed(b, value):
    """Return SplitMix64's finaliser of one int64."""
    return emit_mixed(b, value)


@emits(DOUBLE, DOUBLE)
def negative_log(b, x):
    """Return -log(x) of a normal positive float64."""
    return emit_negative_log(b, x)


@emits(DOUBLE, INT, INT)
def least_exponential(b, key, block):
    """Return the least exponential variable of one block."""
    return emit_least_exponential(b, key, block)[0]


@emits(DOUBLE, INT, INT)
def exponential(b, key, token):
    """Return the exponential variable of one id, which is added to the least one of its block."""
    return emit_negative_log(b, emit_uniform(b, emit_random_bits(b, key, token)))


@emits(NOTHING, INT, INT, INT, INT)
def store_noise(b, key, block, noise, offset):
    """Store, for 8 blocks from `block` on, the largest noise (float64 at `noise`) and the offset of its id (int64 at `offset`)."""
    vector = ir.VectorType(I64, BLOCKS_AT_ONCE)
    blocks = b.add(broadcast(b, block, vector), ir.Constant(vector, list(range(BLOCKS_AT_ONCE))))
    least, offsets = emit_least_exponential(b, broadcast(b, key, vector), blocks)
    store(b, emit_negative_log(b, least), noise, 8)
    store(b, offsets, offset, 8)


assert math.isclose(_LN2_HIGH + _LN2_LOW, math.log(2), rel_tol=1e-15)

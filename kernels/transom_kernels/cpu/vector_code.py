"""Emits LLVM code for vectors of 16 lanes, for the functions of `simd.py` and for kernels that emit their inner loops themselves.

Each function appends instructions to an LLVM builder and returns the value that they compute. On processors with narrower
registers LLVM splits a vector. Only this module chooses instructions that some processors have and others lack (products of
bfloat16 pairs or of 8-bit quads).

- part: the first `count` of 16 lanes, for widths that are not multiples of 16; the other lanes are 0 and are not stored.
- pair: two bfloat16 numbers in the 32 bits of one lane; the first is in the low half.
- quad: four 8-bit integers in the 32 bits of one lane.

With TRANSOM_CHECKED_KERNELS=1 each access is compared with the memory that the launch named (`bounds.py`).
"""

import math
import struct
from collections.abc import Callable

from llvmlite import ir

from transom_kernels.cpu.bounds import checked_address
from transom_kernels.cpu.language import FLOAT, FLOATS, emits
from transom_kernels.cpu.target import cpu_target

LANES = 16
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
F16 = ir.HalfType()
F32_16, I32_16 = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not know."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


BF16 = _BFloat()

# --- functions, constants, memory


def function(b: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
    """Declare an LLVM function (an intrinsic) in the builder's module, once."""
    found = b.module.globals.get(name)
    return found if found is not None else ir.Function(b.module, ir.FunctionType(result, arguments), name)


def int64(value: int) -> ir.Constant:
    """Return a 64-bit constant."""
    return ir.Constant(I64, value)


def int32(value: int) -> ir.Constant:
    """Return a 32-bit constant."""
    return ir.Constant(I32, value)


def constant(vector: ir.VectorType, value: float) -> ir.Constant:
    """Return a constant vector with `value` in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def float32_constant(number: float) -> ir.Constant:
    """Return a constant of the float32 nearest to `number`; LLVM rejects numbers that are not exactly a float32."""
    return ir.Constant(F32, struct.unpack("<f", struct.pack("<f", number))[0])


def load(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    """Load a value of `kind` at an address."""
    address = checked_address(b, address, num_bytes(kind))
    return b.load(b.inttoptr(address, ir.PointerType(kind)), align=align)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = 1) -> None:
    """Store a value at an address."""
    address = checked_address(b, address, num_bytes(value.type))
    b.store(value, b.inttoptr(address, ir.PointerType(value.type)), align=align)


def num_bytes(kind: ir.Type) -> int:
    """Return the bytes of a value in memory."""
    if isinstance(kind, ir.VectorType):
        return int(kind.count) * num_bytes(kind.element)
    if isinstance(kind, ir.IntType):
        return max(1, int(kind.width) // 8)
    return {"float": 4, "half": 2, "bfloat": 2, "double": 8}[str(kind)]


def emit_prefetch(b: ir.IRBuilder, address: ir.Value, *, level: int = 1) -> None:
    """Prefetch a cache line that will be read soon into the cache of a level (1 or 2); any address is allowed."""
    byte = ir.PointerType(I8)
    fetch = function(b, "llvm.prefetch.p0", ir.VoidType(), [byte, I32, I32, I32])
    b.call(fetch, [b.inttoptr(address, byte), int32(0), int32(4 - level), int32(1)])


# --- vectors from and to memory


def emit_load(b: ir.IRBuilder, address: ir.Value, dtype: str) -> ir.Value:
    """Load 16 numbers of a dtype, as float32."""
    element = F32 if dtype == "f32" else I16
    return widened(b, load(b, address, ir.VectorType(element, LANES), num_bytes(element)), dtype)


def emit_load_part(b: ir.IRBuilder, address: ir.Value, count: ir.Value, dtype: str) -> ir.Value:
    """Load the first `count` of 16 numbers of a dtype, as float32."""
    element, name = (F32, "f32") if dtype == "f32" else (I16, "i16")
    vector, masks = ir.VectorType(element, LANES), ir.VectorType(I1, LANES)
    address = checked_address(b, address, b.mul(count, int64(num_bytes(element))))
    pointer = b.inttoptr(address, ir.PointerType(vector))
    masked = function(b, f"llvm.masked.load.v{LANES}{name}.p0", vector, [pointer.type, I32, masks, vector])
    zero = ir.Constant(vector, [0] * LANES)
    return widened(b, b.call(masked, [pointer, int32(num_bytes(element)), lane_mask(b, count), zero]), dtype)


def emit_store(b: ir.IRBuilder, address: ir.Value, x: ir.Value, dtype: str) -> None:
    """Round 16 float32 numbers to a dtype and store them."""
    store(b, narrowed(b, x, dtype), address, 4 if dtype == "f32" else 2)


def emit_store_part(b: ir.IRBuilder, address: ir.Value, x: ir.Value, count: ir.Value, dtype: str) -> None:
    """Round the first `count` lanes to a dtype and store them."""
    value, name = narrowed(b, x, dtype), "f32" if dtype == "f32" else "i16"
    masks = ir.VectorType(I1, LANES)
    address = checked_address(b, address, b.mul(count, int64(num_bytes(value.type.element))))
    pointer = b.inttoptr(address, ir.PointerType(value.type))
    masked = function(b, f"llvm.masked.store.v{LANES}{name}.p0", ir.VoidType(), [value.type, pointer.type, I32, masks])
    b.call(masked, [value, pointer, int32(num_bytes(value.type.element)), lane_mask(b, count)])


def lane_mask(b: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Return which of 16 lanes are below `count`, as bits."""
    lanes = ir.Constant(I32_16, list(range(LANES)))
    return b.icmp_signed("<", lanes, broadcast(b, b.trunc(count, I32), I32_16))


def repeated_rows(b: ir.IRBuilder, first: ir.Value, stride: ir.Value, last: ir.Value, count: int) -> list[ir.Value]:
    """Return the addresses of `count` rows; rows after number `last` get the address of row `last`."""
    numbers = [b.select(b.icmp_signed("<", int64(row), last), int64(row), last) for row in range(count)]
    return [b.add(first, b.mul(number, stride)) for number in numbers]


# --- lanes


def lanewise(b: ir.IRBuilder, name: str, *x: ir.Value) -> ir.Value:
    """Apply LLVM's function `name` to each lane of vectors of float32."""
    return b.call(function(b, f"llvm.{name}.v{LANES}f32", F32_16, [F32_16] * len(x)), x)


def broadcast(b: ir.IRBuilder, scalar: ir.Value, vector: ir.VectorType) -> ir.Value:
    """Return a vector with `scalar` in every lane."""
    one = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, int32(0))
    lanes = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes)


def shuffle(b: ir.IRBuilder, first: ir.Value, second: ir.Value, lanes: list[int]) -> ir.Value:
    """Return the given lanes of two vectors; the lanes of the second vector are numbered after those of the first."""
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def transpose(b: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Return the transpose of 16 vectors: lane i of vector j becomes lane j of vector i."""
    rows = list(rows)
    for s in (1, 2, 4, 8):  # swap the off-diagonal halves of all blocks of 2, 4, 8 and 16
        low = [lane if not lane & s else LANES + lane - s for lane in range(LANES)]
        high = [lane + s if not lane & s else LANES + lane for lane in range(LANES)]
        for i in (i for i in range(LANES) if not i & s):
            x, y = rows[i], rows[i + s]
            rows[i], rows[i + s] = shuffle(b, x, y, low), shuffle(b, x, y, high)
    return rows


@emits(FLOAT, FLOATS)
def horizontal_sum(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return the sum of the lanes. Halves are added to each other, so that the order is fixed."""
    for half in (8, 4, 2, 1):
        lanes = list(range(LANES))
        x = b.fadd(x, shuffle(b, x, x, [(lane + half) % LANES for lane in lanes]))
    return b.extract_element(x, int32(0))


# --- products of float32 and of pairs


@emits(FLOATS, FLOATS, FLOATS, FLOATS)
def multiply_add(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """Return x * y + z, rounded once."""
    return lanewise(b, "fma", x, y, z)


def dot_pairs(b: ir.IRBuilder, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """Return total + x.low * y.low + x.high * y.high in float32, lane by lane; x and y are pairs."""
    target = cpu_target()
    if target.bf16:
        name, lanes = ("x86.avx512bf16.dpbf16ps.512", 16) if target.x86 else ("aarch64.neon.bfdot.v4f32.v8bf16", 4)
        return b.bitcast(_by_parts(b, f"llvm.{name}", lanes, [(total, F32), (x, BF16), (y, BF16)], F32), F32_16)
    for widen in (pair_low, pair_high):
        total = multiply_add(b, widen(b, x), widen(b, y), total)
    return total


def pair_low(b: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    """Return the first number of each pair, in float32."""
    return b.bitcast(b.shl(pairs, constant(I32_16, 16)), F32_16)


def pair_high(b: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    """Return the second number of each pair, in float32."""
    return b.bitcast(b.and_(pairs, constant(I32_16, 0xFFFF0000)), F32_16)


# --- products of integers
WIDE_LARGEST = 127 * 256  # largest magnitude of the integers that `store_wide` takes: their high byte must fit


def store_wide(b: ir.IRBuilder, parts: list[ir.Value], address: ir.Value) -> None:
    """Store 32 integers, given as two vectors of int32, as 8 quads of 16-bit integers for `dot_wide`, in 64 bytes.

    With VNNI the memory holds 32 high bytes, then 32 low bytes, where integer = 256 * high + low and both are signed. Otherwise
    each quad takes 8 bytes: the first and the third integer, then the second and the fourth.
    """
    for index, part in enumerate(parts):
        if _has_vnni():
            eight, bytes_ = constant(I32_16, 8), ir.VectorType(I8, LANES)
            high = b.ashr(b.add(part, constant(I32_16, 128)), eight)
            store(b, b.trunc(high, bytes_), b.add(address, int64(16 * index)), 16)
            store(b, b.trunc(part, bytes_), b.add(address, int64(32 + 16 * index)), 16)
        else:
            halves = b.trunc(part, ir.VectorType(I16, LANES))
            order = [4 * quad + lane for quad in range(4) for lane in (0, 2, 1, 3)]
            store(b, shuffle(b, halves, halves, order), b.add(address, int64(32 * index)), 16)


def dot_wide(
    b: ir.IRBuilder, totals: tuple[ir.Value, ir.Value], unsigned: ir.Value, address: ir.Value, quad: int
) -> tuple[ir.Value, ir.Value]:
    """Multiply, in each lane, its four unsigned 8-bit integers by a stored quad (`store_wide`); add the products to `totals`.

    `wide_total` adds up the pair of totals.
    """
    if _has_vnni():
        high, low = (broadcast(b, load(b, b.add(address, int64(at + 4 * quad)), I32, 4), I32_16) for at in (0, 32))
        return _dot_bytes(b, totals[0], unsigned, high), _dot_bytes(b, totals[1], unsigned, low)
    at = b.add(address, int64(8 * quad))
    parts = (broadcast(b, load(b, b.add(at, int64(offset)), I32, 4), I32_16) for offset in (0, 4))
    products = [dot_halves(b, left, right) for left, right in zip(_even_and_odd(b, unsigned), parts, strict=True)]
    return totals[0], b.add(totals[1], b.add(*products))


def wide_total(b: ir.IRBuilder, totals: tuple[ir.Value, ir.Value]) -> ir.Value:
    """Return the sum of all products that were added to a pair of totals that began as zeros; int32, exact."""
    return b.add(b.shl(totals[0], constant(I32_16, 8)), totals[1]) if _has_vnni() else totals[1]


def _has_vnni() -> bool:
    return cpu_target().vnni or cpu_target().avx_vnni


def _dot_bytes(b: ir.IRBuilder, total: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    lanes = 16 if cpu_target().vnni else 8
    operands = [(total, I32), (unsigned, I8), (signed, I8)]
    return _by_parts(b, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", lanes, operands, I32)


def _even_and_odd(b: ir.IRBuilder, unsigned: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the first and third, and the second and fourth, unsigned 8-bit integers of each lane, as 16-bit integers."""
    return b.and_(unsigned, constant(I32_16, 0x00FF00FF)), b.and_(
        b.lshr(unsigned, constant(I32_16, 8)), constant(I32_16, 0x00FF00FF)
    )


def dot_halves(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Return the sum, in int32, of the two products of signed 16-bit integers in each lane."""
    target = cpu_target()
    if target.x86:
        name, lanes = ("avx512.pmaddw.d.512", 16) if target.avx512 else ("avx2.pmadd.wd", 8)
        if not target.avx2:
            name, lanes = "sse2.pmadd.wd", 4
        return _by_parts(b, f"llvm.x86.{name}", lanes, [(x, I16), (y, I16)], I32)
    half = constant(I32_16, 16)
    low = [b.ashr(b.shl(lane, half), half) for lane in (x, y)]
    high = [b.ashr(lane, half) for lane in (x, y)]
    return b.add(b.mul(*low), b.mul(*high))


_IN_LANE = {I8: 4, I16: 2, BF16: 2, I32: 1, F32: 1}  # type -> elements in a lane


def _by_parts(
    b: ir.IRBuilder, name: str, lanes: int, operands: list[tuple[ir.Value, ir.Type]], result: ir.Type
) -> ir.Value:
    """Call an intrinsic that takes `lanes` lanes of 32 bits on each part of vectors of 16 such lanes.

    Each operand is given with the type of its elements; the elements of the intrinsic's result have the type `result`.
    """
    kinds = [ir.VectorType(element, lanes * _IN_LANE[element]) for _, element in operands]
    intrinsic_function = function(b, name, ir.VectorType(result, lanes * _IN_LANE[result]), kinds)
    if lanes == LANES:
        values = [b.bitcast(value, kind) for (value, _), kind in zip(operands, kinds, strict=True)]
        return b.bitcast(b.call(intrinsic_function, values), I32_16)
    parts = []
    for first in range(0, LANES, lanes):
        chosen = list(range(first, first + lanes))
        values = [
            b.bitcast(shuffle(b, value, value, chosen), kind) for (value, _), kind in zip(operands, kinds, strict=True)
        ]
        parts.append(b.bitcast(b.call(intrinsic_function, values), ir.VectorType(I32, lanes)))
    while len(parts) > 1:
        both = list(range(2 * parts[0].type.count))
        parts = [shuffle(b, parts[i], parts[i + 1], both) for i in range(0, len(parts), 2)]
    return parts[0]


# --- conversions
_FP4 = (0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6 in bfloat16
_FP4_SIGNED = (*_FP4, *(bits | 0x8000 for bits in _FP4))


def look_up_halves(b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
    """Look up, in a table of 16 words of 16 bits, the code in the low 4 bits of each 16-bit half of each lane.

    The fifth bit of a half is ignored. Only for processors with AVX-512.
    """
    half = ir.VectorType(I16, 2 * LANES)
    look_up = function(b, "llvm.x86.avx512.permvar.hi.512", half, [half, half])
    return b.bitcast(b.call(look_up, [ir.Constant(half, [*table, *table]), b.bitcast(codes, half)]), I32_16)


def bf16_pairs(b: ir.IRBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    """Round 32 numbers, two vectors of float32, to 16 pairs in their order. Only for processors with products of pairs."""
    kind = ir.VectorType(BF16, 2 * LANES)
    if not cpu_target().x86:
        low, high = (b.fptrunc(x, ir.VectorType(BF16, LANES)) for x in (first, second))
        return b.bitcast(shuffle(b, low, high, list(range(2 * LANES))), I32_16)
    convert = function(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, [F32_16, F32_16])
    return b.bitcast(b.call(convert, [second, first]), I32_16)


def fp4_pairs(b: ir.IRBuilder, words: ir.Value, index: int) -> ir.Value:
    """Return 16 pairs of fp4 numbers (a sign bit, two exponent bits, one fraction bit), in bfloat16.

    Each 32-bit word has eight such numbers, four in each half. A pair is number `index` (0 to 3) of the low and of the high half.
    """
    shifted = b.lshr(words, constant(I32_16, 4 * index))
    if (
        cpu_target().bf16 and cpu_target().avx512
    ):  # the fifth bit of each half belongs to the next number and is ignored
        return look_up_halves(b, list(_FP4_SIGNED), shifted)
    high = b.lshr(words, constant(I32_16, 16 + 4 * index))
    if cpu_target().avx512:
        low = _look_up(b, list(_FP4_SIGNED), shifted)
        return b.or_(low, _look_up(b, [bits << 16 for bits in _FP4_SIGNED], high))
    low, high = (_fp4_bits(b, b.and_(code, constant(I32_16, 15))) for code in (shifted, high))
    return b.or_(low, b.shl(high, constant(I32_16, 16)))


def _look_up(b: ir.IRBuilder, table: list[int], index: ir.Value) -> ir.Value:
    """Look up the low 4 bits of each lane in a table of 16 words."""
    words = ir.Constant(I32_16, table)
    return b.call(function(b, "llvm.x86.avx512.permvar.si.512", I32_16, [I32_16] * 2), [words, index])


def _fp4_bits(b: ir.IRBuilder, code: ir.Value) -> ir.Value:
    """Return the bfloat16 bits of fp4 numbers. From 1.0 on, exponent and fraction are kept; only the exponent's bias changes."""
    size = b.and_(code, constant(I32_16, 7))
    normal = b.add(b.shl(size, constant(I32_16, 6)), constant(I32_16, 126 << 7))
    half = b.and_(b.sub(constant(I32_16, 0), size), constant(I32_16, _FP4[1]))  # code 0 is 0.0, code 1 is 0.5
    bits = b.select(b.icmp_signed(">", size, constant(I32_16, 1)), normal, half)
    return b.or_(bits, b.shl(b.and_(code, constant(I32_16, 8)), constant(I32_16, 12)))


def half_to_float(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Return 16 finite float16 numbers, given as 16-bit integers, in float32; exact, with or without conversion instructions."""
    target = cpu_target()
    if target.avx2 or not target.x86:
        return b.fpext(b.bitcast(bits, ir.VectorType(F16, LANES)), F32_16)
    wide = b.zext(bits, I32_16)
    magnitude = b.shl(b.and_(wide, constant(I32_16, 0x7FFF)), constant(I32_16, 13))
    sign = b.shl(b.and_(wide, constant(I32_16, 0x8000)), constant(I32_16, 16))
    value = b.fmul(b.bitcast(magnitude, F32_16), constant(F32_16, 2.0**112))  # the exponents' biases are 15 and 127
    return b.bitcast(b.or_(b.bitcast(value, I32_16), sign), F32_16)


def narrowed(b: ir.IRBuilder, x: ir.Value, dtype: str) -> ir.Value:
    """Round 16 float32 numbers to a dtype; 16-bit numbers are returned as integers."""
    half = ir.VectorType(I16, LANES)
    if dtype == "f32":
        return x
    return _bf16_bits(b, x) if dtype == "bf16" else b.bitcast(b.fptrunc(x, ir.VectorType(F16, LANES)), half)


def rounded(b: ir.IRBuilder, x: ir.Value, dtype: str) -> ir.Value:
    """Round 16 float32 numbers to a dtype, and return them in float32."""
    return widened(b, narrowed(b, x, dtype), dtype)


def widened(b: ir.IRBuilder, x: ir.Value, dtype: str) -> ir.Value:
    """Return one number, or a vector of numbers, of a dtype in float32; 16-bit numbers are given as integers."""
    if dtype == "f32":
        return x
    count = getattr(x.type, "count", None)
    words, floats, halves = (ir.VectorType(kind, count) if count else kind for kind in (I32, F32, F16))
    if dtype == "f16":
        return b.fpext(b.bitcast(x, halves), floats)
    sixteen = constant(words, 16) if count else int32(16)
    return b.bitcast(b.shl(b.zext(x, words), sixteen), floats)


def _bf16_bits(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Round float32 to bfloat16 (to nearest, ties to even), as 16-bit integers; NaN stays NaN."""
    half = ir.VectorType(I16, LANES)
    if cpu_target().bf16:
        return b.bitcast(b.fptrunc(x, ir.VectorType(BF16, LANES)), half)
    bits = b.bitcast(x, I32_16)
    lowest = b.and_(b.lshr(bits, constant(I32_16, 16)), constant(I32_16, 1))
    nearest = b.lshr(b.add(bits, b.add(lowest, constant(I32_16, 0x7FFF))), constant(I32_16, 16))
    quiet = b.or_(b.lshr(bits, constant(I32_16, 16)), constant(I32_16, 0x40))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), quiet, nearest), half)


# --- functions of float32
# coefficients of the Taylor series of 2 ** x around 0, from x ** 6 down
_EXP2_FACTORS = (
    1.5403530393381608e-4, 1.3333558146428443e-3, 9.618129107628477e-3, 5.550410866482158e-2, 0.2402265069591007,
    0.6931471805599453, 1.0,
)  # fmt: skip


@emits(FLOATS, FLOATS)
def emit_exp2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return 2 ** x for x up to 127, with a relative error of at most 3e-7; 0 for x below -126."""
    low = b.fcmp_ordered("<", x, constant(F32_16, -126.0))
    clamped = lanewise(b, "maxnum", x, constant(F32_16, -126.0))
    whole = lanewise(b, "rint", clamped)
    part = b.fsub(clamped, whole)
    total = constant(F32_16, _EXP2_FACTORS[0])
    for factor in _EXP2_FACTORS[1:]:
        total = multiply_add(b, total, part, constant(F32_16, factor))
    scaled = b.add(b.bitcast(total, I32_16), b.shl(b.fptosi(whole, I32_16), constant(I32_16, 23)))
    return b.select(low, constant(F32_16, 0.0), b.bitcast(scaled, F32_16))


# degree -> coefficients of a polynomial for 2 ** x in [-0.5, 0.5], highest power first, without the last one, which is 1
_WEIGHT_FACTORS = {
    3: (0.05500892922282219, 0.2422109693288803, 0.6932829022407532),
    5: (0.001326472731307149, 0.009671512991189957, 0.05550733581185341, 0.24022242426872253, 0.6931470036506653),
}


def emit_weight(b: ir.IRBuilder, x: ir.Value, degree: int) -> ir.Value:
    """Return 2 ** x for x up to 0 (softmax weights); 0 for very low x. The relative error is 1e-4 at degree 3, 1e-7 at degree 5."""
    whole = lanewise(b, "rint", x)
    part = b.fsub(x, whole)
    total = constant(F32_16, _WEIGHT_FACTORS[degree][0])
    for factor in (*_WEIGHT_FACTORS[degree][1:], 1.0):
        total = multiply_add(b, total, part, constant(F32_16, factor))
    if cpu_target().avx512:
        scale = function(b, "llvm.x86.avx512.mask.scalef.ps.512", F32_16, [F32_16, F32_16, F32_16, I16, I32])
        rounding_as_set, all_lanes = int32(4), ir.Constant(I16, 0xFFFF)
        return b.call(scale, [total, whole, constant(F32_16, 0.0), all_lanes, rounding_as_set])
    kept = b.fcmp_ordered(">=", x, constant(F32_16, -126.0))
    whole = b.select(kept, whole, constant(F32_16, 0.0))
    scaled = b.add(b.bitcast(total, I32_16), b.shl(b.fptosi(whole, I32_16), constant(I32_16, 23)))
    return b.select(kept, b.bitcast(scaled, F32_16), constant(F32_16, 0.0))


# pi / 2 as the sum of three numbers; the first two have few bits, so that their products with a number of turns are exact
_HALF_PI_PARTS = (1.5703125, 4.837512969970703e-4, 7.549789954891882e-8)
# coefficients of sin(x) = x + x ** 3 * p(x ** 2) and of cos(x) = 1 - x ** 2 / 2 + x ** 4 * p(x ** 2), highest power first
_SINE_FACTORS = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE_FACTORS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def emit_sine(b: ir.IRBuilder, x: ir.Value, quarters: int) -> ir.Value:
    """Return sin(x + quarters * pi / 2) within 1e-7, for x up to some millions."""
    quarter = constant(I32_16, quarters)
    for _ in range(2):  # twice: for large x the first number of quarter turns may be off by one
        turns = lanewise(b, "rint", b.fmul(x, constant(F32_16, 2 / math.pi)))
        negative = b.fsub(constant(F32_16, 0.0), turns)
        for part in _HALF_PI_PARTS:
            x = multiply_add(b, negative, constant(F32_16, part), x)
        quarter = b.add(quarter, b.fptosi(turns, I32_16))
    square = b.fmul(x, x)

    def polynomial(factors: tuple[float, ...]) -> ir.Value:
        total = constant(F32_16, factors[0])
        for factor in factors[1:]:
            total = multiply_add(b, total, square, constant(F32_16, factor))
        return total

    sine = multiply_add(b, b.fmul(square, x), polynomial(_SINE_FACTORS), x)
    flat = multiply_add(b, square, constant(F32_16, -0.5), constant(F32_16, 1.0))
    cosine = multiply_add(b, b.fmul(square, square), polynomial(_COSINE_FACTORS), flat)
    is_odd = b.icmp_signed("!=", b.and_(quarter, constant(I32_16, 1)), constant(I32_16, 0))
    result = b.bitcast(b.select(is_odd, cosine, sine), I32_16)
    sign = b.shl(b.and_(quarter, constant(I32_16, 2)), constant(I32_16, 30))
    return b.bitcast(b.xor(result, sign), F32_16)


# --- loops


class Loop:
    """Emits `for k in range(0, stop, step)` with carried values; `results` are their values after the last iteration.

    Unless `may_be_empty`, the body runs at least once, and `stop` must be above 0.
    """

    def __init__(
        self,
        b: ir.IRBuilder,
        stop: ir.Value,
        step: int,
        carried: list[ir.Value],
        body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
        *,
        may_be_empty: bool = False,
    ) -> None:
        before = b.block
        head, end = b.append_basic_block("loop"), b.append_basic_block("end")
        if may_be_empty:
            b.cbranch(b.icmp_signed("<", int64(0), stop), head, end)
        else:
            b.branch(head)
        b.position_at_end(head)
        k = b.phi(I64)
        values = [b.phi(value.type) for value in carried]
        k.add_incoming(int64(0), before)
        for value, initial in zip(values, carried, strict=True):
            value.add_incoming(initial, before)
        self.results = body(k, list(values))
        following = b.add(k, int64(step))
        last = b.block
        k.add_incoming(following, last)
        for value, result in zip(values, self.results, strict=True):
            value.add_incoming(result, last)
        b.cbranch(b.icmp_signed("<", following, stop), head, end)
        b.position_at_end(end)
        if may_be_empty:
            self.results = [
                _either(b, result, last, initial, before) for result, initial in zip(self.results, carried, strict=True)
            ]


def _either(b: ir.IRBuilder, value: ir.Value, block: ir.Block, other: ir.Value, other_block: ir.Block) -> ir.Value:
    """Return `value` if control comes from `block`, and `other` if it comes from `other_block`."""
    merged = b.phi(value.type)
    merged.add_incoming(value, block)
    merged.add_incoming(other, other_block)
    return merged

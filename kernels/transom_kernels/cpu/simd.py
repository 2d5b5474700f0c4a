"""Vectors for kernels that numba compiles: types of 16 lanes, loads and stores at raw addresses, products and reductions.

A kernel is a Python function over integers (addresses in bytes), scalars and these vectors. A vector lives in a register; it is
made by `load_*` and `splat`, and combined by `+ - *` and the functions here. On processors with narrower registers LLVM
splits it. Where a processor has an instruction of its own (bfloat16 pairs, 8-bit quads), this module alone chooses it.

- part: the first `count` of 16 lanes, for widths that are no multiple of 16; the other lanes are 0 and are not stored.
- pair: two bfloat16 numbers in the 32 bits of one lane; the first is in the low half.
- quad: four 8-bit integers in the 32 bits of one lane.

With TRANSOM_CHECKED_KERNELS=1 each access is compared with the memory that the launch named (`bounds.py`).
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

from transom_kernels.cpu.bounds import checked_address
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


class Vector(types.Type):
    """Numba's type of a vector of 16 lanes of float32 or int32."""

    def __init__(self, element: str) -> None:
        super().__init__(name=f"{element}x{LANES}")


f32x16, i32x16 = Vector("float32"), Vector("int32")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Vector) -> None:
        super().__init__(manager, numba_type, F32_16 if numba_type is f32x16 or numba_type == f32x16 else I32_16)


# --- code generation helpers, for this module and for kernels that build their inner loop themselves


def function(b: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
    """Declare an LLVM function (an intrinsic) in the builder's module, once."""
    found = b.module.globals.get(name)
    return found if found is not None else ir.Function(b.module, ir.FunctionType(result, arguments), name)


def int64(value: int) -> ir.Constant:
    """A constant of 64 bits."""
    return ir.Constant(I64, value)


def int32(value: int) -> ir.Constant:
    """A constant of 32 bits."""
    return ir.Constant(I32, value)


def constant(vector: ir.VectorType, value: float) -> ir.Constant:
    """A vector with `value` in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def load(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    """Load a value of `kind` at an address."""
    address = checked_address(b, address, _num_bytes(kind))
    return b.load(b.inttoptr(address, ir.PointerType(kind)), align=align)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = 1) -> None:
    """Store a value at an address."""
    address = checked_address(b, address, _num_bytes(value.type))
    b.store(value, b.inttoptr(address, ir.PointerType(value.type)), align=align)


def float32_constant(number: float) -> ir.Constant:
    """The nearest float32: LLVM takes no other constants of that type."""
    return ir.Constant(F32, struct.unpack("<f", struct.pack("<f", number))[0])


def broadcast(b: ir.IRBuilder, scalar: ir.Value, vector: ir.VectorType) -> ir.Value:
    """A vector with `scalar` in every lane."""
    one = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, int32(0))
    lanes = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes)


def shuffle(b: ir.IRBuilder, first: ir.Value, second: ir.Value, lanes: list[int]) -> ir.Value:
    """The lanes of two vectors, numbered through, in a new order."""
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def multiply_add(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once."""
    return b.call(function(b, f"llvm.fma.v{LANES}f32", F32_16, [F32_16] * 3), [x, y, z])


def dot_pairs(b: ir.IRBuilder, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """total + x.low * y.low + x.high * y.high in float32, lane by lane; x and y are pairs."""
    if cpu_target().bf16:
        pairs = ir.VectorType(BF16, 2 * LANES)
        product = function(b, "llvm.x86.avx512bf16.dpbf16ps.512", F32_16, [F32_16, pairs, pairs])
        return b.call(product, [total, b.bitcast(x, pairs), b.bitcast(y, pairs)])
    for widen in (pair_low, pair_high):
        total = multiply_add(b, widen(b, x), widen(b, y), total)
    return total


def pair_low(b: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    """The first number of each pair, in float32."""
    return b.bitcast(b.shl(pairs, constant(I32_16, 16)), F32_16)


def pair_high(b: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    """The second number of each pair, in float32."""
    return b.bitcast(b.and_(pairs, constant(I32_16, 0xFFFF0000)), F32_16)


WIDE_LARGEST = 127 * 256  # magnitude of the integers that `store_wide` takes
WIDE_BYTES = 64  # of 32 integers


def store_wide(b: ir.IRBuilder, parts: list[ir.Value], address: ir.Value) -> None:
    """Store 32 integers, two vectors of int32, as 8 quads of 16-bit integers for `dot_wide`, in 64 bytes.

    With VNNI they lie there as 32 high bytes and 32 low bytes, integer = 256 * high + low; both are signed. Otherwise each quad has
    8 bytes: the first and third, then the second and fourth integer.
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
    """Add the four products of unsigned 8-bit integers of each lane and one stored quad to a pair of totals (`wide_total`)."""
    if _has_vnni():
        high, low = (broadcast(b, load(b, b.add(address, int64(at + 4 * quad)), I32, 4), I32_16) for at in (0, 32))
        return _dot_bytes(b, totals[0], unsigned, high), _dot_bytes(b, totals[1], unsigned, low)
    at = b.add(address, int64(8 * quad))
    parts = (broadcast(b, load(b, b.add(at, int64(offset)), I32, 4), I32_16) for offset in (0, 4))
    products = [dot_halves(b, left, right) for left, right in zip(_even_and_odd(b, unsigned), parts, strict=True)]
    return totals[0], b.add(totals[1], b.add(*products))


def wide_total(b: ir.IRBuilder, totals: tuple[ir.Value, ir.Value]) -> ir.Value:
    """The sum of the products that were added to a pair of totals, which begins with zeros; int32, exact."""
    return b.add(b.shl(totals[0], constant(I32_16, 8)), totals[1]) if _has_vnni() else totals[1]


def _has_vnni() -> bool:
    return cpu_target().vnni or cpu_target().avx_vnni


def _dot_bytes(b: ir.IRBuilder, total: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    lanes = 16 if cpu_target().vnni else 8
    operands = [(total, I32), (unsigned, I8), (signed, I8)]
    return _by_parts(b, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", lanes, operands, I32)


def _even_and_odd(b: ir.IRBuilder, unsigned: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The first and third, and the second and fourth, unsigned 8-bit integers of each lane, as 16-bit integers."""
    return b.and_(unsigned, constant(I32_16, 0x00FF00FF)), b.and_(
        b.lshr(unsigned, constant(I32_16, 8)), constant(I32_16, 0x00FF00FF)
    )


_FP4 = (0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6 in bfloat16
_FP4_SIGNED = (*_FP4, *(bits | 0x8000 for bits in _FP4))


def look_up_halves(b: ir.IRBuilder, table: list[int], codes: ir.Value) -> ir.Value:
    """Entries of a table of 16 16-bit words, for the code in the low 4 bits of each 16-bit half of each lane.

    The fifth bit of a half may be set, too. For processors that multiply pairs alone, which have the instruction.
    """
    half = ir.VectorType(I16, 2 * LANES)
    look_up = function(b, "llvm.x86.avx512.permvar.hi.512", half, [half, half])
    return b.bitcast(b.call(look_up, [ir.Constant(half, [*table, *table]), b.bitcast(codes, half)]), I32_16)


def bf16_pairs(b: ir.IRBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    """32 numbers, two vectors of float32, rounded to 16 pairs in their order. For processors that multiply pairs alone."""
    kind = ir.VectorType(BF16, 2 * LANES)
    convert = function(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, [F32_16, F32_16])
    return b.bitcast(b.call(convert, [second, first]), I32_16)


def fp4_pairs(b: ir.IRBuilder, words: ir.Value, index: int) -> ir.Value:
    """Pairs of the 4-bit numbers (e2m1: sign, two bits of exponent, one of fraction) at `index` (0 to 3) of each half of a word."""
    shifted = b.lshr(words, constant(I32_16, 4 * index))
    if cpu_target().bf16:  # the fifth bit of an index belongs to the next number
        return look_up_halves(b, list(_FP4_SIGNED), shifted)
    high = b.lshr(words, constant(I32_16, 16 + 4 * index))
    if cpu_target().avx512:
        low = _look_up(b, list(_FP4_SIGNED), shifted)
        return b.or_(low, _look_up(b, [bits << 16 for bits in _FP4_SIGNED], high))
    low, high = (_fp4_bits(b, b.and_(code, constant(I32_16, 15))) for code in (shifted, high))
    return b.or_(low, b.shl(high, constant(I32_16, 16)))


def _look_up(b: ir.IRBuilder, table: list[int], index: ir.Value) -> ir.Value:
    """Entries of a table of 16 words; an index is the low 4 bits of its lane."""
    words = ir.Constant(I32_16, table)
    return b.call(function(b, "llvm.x86.avx512.permvar.si.512", I32_16, [I32_16] * 2), [words, index])


def _fp4_bits(b: ir.IRBuilder, code: ir.Value) -> ir.Value:
    """bfloat16 bits of 4-bit numbers. From 1.0 on, exponent and fraction are those of bfloat16, but for the exponent's bias."""
    size = b.and_(code, constant(I32_16, 7))
    normal = b.add(b.shl(size, constant(I32_16, 6)), constant(I32_16, 126 << 7))
    half = b.and_(b.sub(constant(I32_16, 0), size), constant(I32_16, _FP4[1]))  # of 0 and of 1
    bits = b.select(b.icmp_signed(">", size, constant(I32_16, 1)), normal, half)
    return b.or_(bits, b.shl(b.and_(code, constant(I32_16, 8)), constant(I32_16, 12)))


def dot_halves(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The two products of signed 16-bit integers of each lane, added in int32."""
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


def _by_parts(
    b: ir.IRBuilder, name: str, lanes: int, operands: list[tuple[ir.Value, ir.Type]], result: ir.Type
) -> ir.Value:
    """Call an intrinsic that takes `lanes` lanes of 32 bits on each part of vectors of 16 such lanes.

    Operands come with the type of the elements that the intrinsic takes; its own elements have the type `result`.
    """
    kinds = [ir.VectorType(element, lanes * 32 // element.width) for _, element in operands]
    intrinsic_function = function(b, name, ir.VectorType(result, lanes * 32 // result.width), kinds)
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


def half_to_float(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """16 finite float16 numbers, given as 16-bit integers, in float32. Exact on processors without such an instruction, too."""
    target = cpu_target()
    if target.avx2 or not target.x86:
        return b.fpext(b.bitcast(bits, ir.VectorType(F16, LANES)), F32_16)
    wide = b.zext(bits, I32_16)
    magnitude = b.shl(b.and_(wide, constant(I32_16, 0x7FFF)), constant(I32_16, 13))
    sign = b.shl(b.and_(wide, constant(I32_16, 0x8000)), constant(I32_16, 16))
    value = b.fmul(b.bitcast(magnitude, F32_16), constant(F32_16, 2.0**112))  # the exponents' biases are 15 and 127
    return b.bitcast(b.or_(b.bitcast(value, I32_16), sign), F32_16)


def round_bf16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """float32 rounded to bfloat16 (to nearest, ties to even), as 16-bit integers; NaN stays NaN."""
    half = ir.VectorType(I16, LANES)
    if cpu_target().bf16:
        return b.bitcast(b.fptrunc(x, ir.VectorType(BF16, LANES)), half)
    bits = b.bitcast(x, I32_16)
    lowest = b.and_(b.lshr(bits, constant(I32_16, 16)), constant(I32_16, 1))
    rounded = b.lshr(b.add(bits, b.add(lowest, constant(I32_16, 0x7FFF))), constant(I32_16, 16))
    quiet = b.or_(b.lshr(bits, constant(I32_16, 16)), constant(I32_16, 0x40))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), quiet, rounded), half)


def horizontal_sum(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The sum of the lanes, added in halves, so that the order is fixed."""
    for half in (8, 4, 2, 1):
        lanes = list(range(LANES))
        x = b.fadd(x, shuffle(b, x, x, [(lane + half) % LANES for lane in lanes]))
    return b.extract_element(x, int32(0))


class Loop:
    """`for k in range(0, stop, step)` with carried values, in LLVM; `results` are the values after the last round.

    The body runs at least once unless `may_be_empty`: otherwise callers give a `stop` above 0.
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
    """The value that comes with the block that was left."""
    merged = b.phi(value.type)
    merged.add_incoming(value, block)
    merged.add_incoming(other, other_block)
    return merged


def _num_bytes(kind: ir.Type) -> int:
    if isinstance(kind, ir.VectorType):
        return kind.count * _num_bytes(kind.element)
    if isinstance(kind, ir.IntType):
        return max(1, kind.width // 8)
    return {"float": 4, "half": 2, "bfloat": 2, "double": 8}[str(kind)]


# --- operators on vectors


def _operators() -> None:
    cases: list[tuple[Any, Vector, str]] = [
        (operator.add, f32x16, "fadd"),
        (operator.sub, f32x16, "fsub"),
        (operator.mul, f32x16, "fmul"),
        (operator.truediv, f32x16, "fdiv"),
        (operator.add, i32x16, "add"),
        (operator.sub, i32x16, "sub"),
        (operator.mul, i32x16, "mul"),
        (operator.and_, i32x16, "and_"),
        (operator.or_, i32x16, "or_"),
    ]
    for key in {key for key, _, _ in cases}:
        kinds = [kind for of, kind, _ in cases if of is key]

        def generic(self: Any, args: Any, kws: Any, kinds: list[Vector] = kinds) -> Any:
            return signature(args[0], *args) if len(args) == 2 and args[0] == args[1] and args[0] in kinds else None

        infer_global(key)(type(f"Vector_{key.__name__}", (AbstractTemplate,), {"generic": generic, "key": key}))
    for key, kind, method in cases:

        def lower(context: Any, b: Any, sig: Any, args: Any, method: str = method) -> Any:
            return getattr(b, method)(*args)

        lower_builtin(key, kind, kind)(lower)


_operators()


def _emits(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a numba intrinsic of a function (builder, *values) -> value. `result` and `arguments` are numba types."""

    def decorate(emit: Callable[..., Any]) -> Any:
        names = ", ".join(f"a{index}" for index in range(len(arguments)))
        scope: dict[str, Any] = {}

        def implement(given: Any) -> Any:
            def generate(context: Any, b: Any, sig: Any, args: Any) -> Any:
                values = [
                    context.cast(b, value, have, want)
                    for value, have, want in zip(args, sig.args, arguments, strict=True)
                ]
                made = emit(b, *values)
                return context.get_dummy_value() if made is None else made

            return signature(result, *arguments), generate

        text = f"def {emit.__name__}(typingctx{', ' + names if names else ''}):\n    return implement(None)\n"
        exec(text, {"implement": implement}, scope)  # numba reads the intrinsic's arguments from its signature
        made = scope[emit.__name__]
        made.__doc__ = emit.__doc__
        return intrinsic(made)

    return decorate


_i, _f, _d = types.int64, types.float32, types.float64

# --- vectors from and to memory


@_emits(f32x16, _f)
def splat(b, x):
    """A vector with `x` in every lane."""
    return broadcast(b, x, F32_16)


@_emits(i32x16, _i)
def splat_int(b, x):
    """A vector with the low 32 bits of `x` in every lane."""
    return broadcast(b, b.trunc(x, I32), I32_16)


def emit_load(b: ir.IRBuilder, address: ir.Value, dtype: str) -> ir.Value:
    """16 numbers of a dtype, in float32."""
    if dtype == "f32":
        return load(b, address, F32_16, 4)
    if dtype == "f16":
        return b.fpext(load(b, address, ir.VectorType(F16, LANES), 2), F32_16)
    bits = b.zext(load(b, address, ir.VectorType(I16, LANES), 2), I32_16)
    return b.bitcast(b.shl(bits, constant(I32_16, 16)), F32_16)


@_emits(f32x16, _i)
def load_f32(b, address):
    """16 float32 numbers."""
    return emit_load(b, address, "f32")


@_emits(f32x16, _i)
def load_bf16(b, address):
    """16 bfloat16 numbers, in float32."""
    return emit_load(b, address, "bf16")


@_emits(f32x16, _i)
def load_f16(b, address):
    """16 float16 numbers, in float32."""
    return emit_load(b, address, "f16")


@_emits(types.void, _i, f32x16)
def store_f32(b, address, x):
    """Store 16 float32 numbers."""
    store(b, x, address, 4)


@_emits(types.void, _i, f32x16)
def store_bf16(b, address, x):
    """Round to bfloat16 and store."""
    store(b, round_bf16(b, x), address, 2)


@_emits(types.void, _i, f32x16)
def store_f16(b, address, x):
    """Round to float16 and store."""
    store(b, b.fptrunc(x, ir.VectorType(F16, LANES)), address, 2)


def _mask(b, count):
    lanes = ir.Constant(I32_16, list(range(LANES)))
    return b.icmp_signed("<", lanes, broadcast(b, b.trunc(count, I32), I32_16))


def _load_part(b, address, count, element, name):
    vector, masks = ir.VectorType(element, LANES), ir.VectorType(I1, LANES)
    address = checked_address(b, address, b.mul(count, int64(_num_bytes(element))))
    pointer = b.inttoptr(address, ir.PointerType(vector))
    masked = function(b, f"llvm.masked.load.v{LANES}{name}.p0", vector, [pointer.type, I32, masks, vector])
    zero = ir.Constant(vector, [0] * LANES)
    return b.call(masked, [pointer, int32(_num_bytes(element)), _mask(b, count), zero])


def _store_part(b, address, value, count, name):
    vector, masks = value.type, ir.VectorType(I1, LANES)
    address = checked_address(b, address, b.mul(count, int64(_num_bytes(vector.element))))
    pointer = b.inttoptr(address, ir.PointerType(vector))
    masked = function(b, f"llvm.masked.store.v{LANES}{name}.p0", ir.VoidType(), [vector, pointer.type, I32, masks])
    b.call(masked, [value, pointer, int32(_num_bytes(vector.element)), _mask(b, count)])


def emit_load_part(b: ir.IRBuilder, address: ir.Value, count: ir.Value, dtype: str) -> ir.Value:
    """The first `count` of 16 numbers of a dtype, in float32."""
    if dtype == "f32":
        return _load_part(b, address, count, F32, "f32")
    bits = _load_part(b, address, count, I16, "i16")
    if dtype == "f16":
        return b.fpext(b.bitcast(bits, ir.VectorType(F16, LANES)), F32_16)
    return b.bitcast(b.shl(b.zext(bits, I32_16), constant(I32_16, 16)), F32_16)


@_emits(f32x16, _i, _i)
def load_part_f32(b, address, count):
    """The first `count` of 16 float32 numbers; the other lanes are 0, and their memory is not read."""
    return emit_load_part(b, address, count, "f32")


@_emits(f32x16, _i, _i)
def load_part_bf16(b, address, count):
    """The first `count` of 16 bfloat16 numbers."""
    return emit_load_part(b, address, count, "bf16")


@_emits(f32x16, _i, _i)
def load_part_f16(b, address, count):
    """The first `count` of 16 float16 numbers."""
    return emit_load_part(b, address, count, "f16")


@_emits(types.void, _i, f32x16, _i)
def store_part_f32(b, address, x, count):
    """Store the first `count` lanes."""
    _store_part(b, address, x, count, "f32")


@_emits(types.void, _i, f32x16, _i)
def store_part_bf16(b, address, x, count):
    """Round the first `count` lanes to bfloat16 and store them."""
    _store_part(b, address, round_bf16(b, x), count, "i16")


@_emits(types.void, _i, f32x16, _i)
def store_part_f16(b, address, x, count):
    """Round the first `count` lanes to float16 and store them."""
    half = b.bitcast(b.fptrunc(x, ir.VectorType(F16, LANES)), ir.VectorType(I16, LANES))
    _store_part(b, address, half, count, "i16")


@_emits(i32x16, _i)
def load_words(b, address):
    """16 words of 32 bits: integers, pairs or quads."""
    return load(b, address, I32_16, 4)


@_emits(types.void, _i, i32x16)
def store_words(b, address, x):
    """Store 16 words of 32 bits."""
    store(b, x, address, 4)


@_emits(i32x16, _i)
def splat_word(b, address):
    """The 32 bits at an address in every lane: one pair, or one quad."""
    return broadcast(b, load(b, address, I32, 4), I32_16)


@_emits(f32x16, f32x16)
def round_f32(b, x):
    """float32 itself: the counterpart of the other roundings."""
    return x


@_emits(f32x16, f32x16)
def round_to_bf16(b, x):
    """Round to bfloat16, and back to float32."""
    return b.bitcast(b.shl(b.zext(round_bf16(b, x), I32_16), constant(I32_16, 16)), F32_16)


@_emits(f32x16, f32x16)
def round_to_f16(b, x):
    """Round to float16, and back to float32."""
    return b.fpext(b.fptrunc(x, ir.VectorType(F16, LANES)), F32_16)


LOAD = {"f32": load_f32, "bf16": load_bf16, "f16": load_f16}
STORE = {"f32": store_f32, "bf16": store_bf16, "f16": store_f16}
LOAD_PART = {"f32": load_part_f32, "bf16": load_part_bf16, "f16": load_part_f16}
STORE_PART = {"f32": store_part_f32, "bf16": store_part_bf16, "f16": store_part_f16}
ROUND = {"f32": round_f32, "bf16": round_to_bf16, "f16": round_to_f16}
NUM_BYTES = {"f32": 4, "bf16": 2, "f16": 2}

# --- arithmetic


@_emits(f32x16, f32x16, f32x16, f32x16)
def fma(b, x, y, z):
    """x * y + z, rounded once."""
    return multiply_add(b, x, y, z)


@_emits(f32x16, f32x16, i32x16, i32x16)
def dot_bf16(b, total, x, y):
    """total + the products of pairs, in float32."""
    return dot_pairs(b, total, x, y)


@_emits(f32x16, i32x16)
def to_float(b, x):
    """int32 as float32."""
    return b.sitofp(x, F32_16)


@_emits(i32x16, f32x16)
def to_int(b, x):
    """float32 rounded to the nearest int32 (ties to even)."""
    return b.fptosi(b.call(function(b, f"llvm.rint.v{LANES}f32", F32_16, [F32_16]), [x]), I32_16)


@_emits(f32x16, f32x16, f32x16)
def vector_max(b, x, y):
    """The larger of each two lanes; NaN loses."""
    return b.call(function(b, f"llvm.maxnum.v{LANES}f32", F32_16, [F32_16] * 2), [x, y])


@_emits(f32x16, f32x16, f32x16)
def vector_min(b, x, y):
    """The smaller of each two lanes; NaN loses."""
    return b.call(function(b, f"llvm.minnum.v{LANES}f32", F32_16, [F32_16] * 2), [x, y])


@_emits(f32x16, f32x16)
def vector_abs(b, x):
    """Absolute values."""
    return b.call(function(b, f"llvm.fabs.v{LANES}f32", F32_16, [F32_16]), [x])


# Taylor's series of 2 ** x around 0, from x ** 6 down
_EXP2_FACTORS = (
    1.5403530393381608e-4, 1.3333558146428443e-3, 9.618129107628477e-3, 5.550410866482158e-2, 0.2402265069591007,
    0.6931471805599453, 1.0,
)  # fmt: skip


def emit_exp2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2 ** x for x up to 127, within 3e-7 of its value; 0 for x below -126."""
    low = b.fcmp_ordered("<", x, constant(F32_16, -126.0))
    clamped = b.call(function(b, f"llvm.maxnum.v{LANES}f32", F32_16, [F32_16] * 2), [x, constant(F32_16, -126.0)])
    whole = b.call(function(b, f"llvm.rint.v{LANES}f32", F32_16, [F32_16]), [clamped])
    part = b.fsub(clamped, whole)
    total = constant(F32_16, _EXP2_FACTORS[0])
    for factor in _EXP2_FACTORS[1:]:
        total = multiply_add(b, total, part, constant(F32_16, factor))
    scaled = b.add(b.bitcast(total, I32_16), b.shl(b.fptosi(whole, I32_16), constant(I32_16, 23)))
    return b.select(low, constant(F32_16, 0.0), b.bitcast(scaled, F32_16))


@_emits(f32x16, f32x16)
def exp2(b, x):
    """2 ** x, for x up to 127; 0 below -126."""
    return emit_exp2(b, x)


# polynomials for 2 ** x in [-0.5, 0.5], by degree, without their last coefficient, which is 1
_WEIGHT_FACTORS = {
    3: (0.05500892922282219, 0.2422109693288803, 0.6932829022407532),
    5: (0.001326472731307149, 0.009671512991189957, 0.05550733581185341, 0.24022242426872253, 0.6931470036506653),
}


def emit_weight(b: ir.IRBuilder, x: ir.Value, degree: int) -> ir.Value:
    """2 ** x for x up to 0, the weights of a softmax; 0 far below 0. The error is 1e-4 with degree 3 and 1e-7 with degree 5."""
    whole = b.call(function(b, f"llvm.rint.v{LANES}f32", F32_16, [F32_16]), [x])
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


@_emits(f32x16, f32x16)
def weight_f32(b, x):
    """2 ** x for finite x up to 0, to the precision of float32."""
    return emit_weight(b, x, 5)


@_emits(f32x16, f32x16)
def weight_bf16(b, x):
    """2 ** x for finite x up to 0, to more than the precision of bfloat16."""
    return emit_weight(b, x, 3)


LOG2_E = 1.4426950408889634


@_emits(f32x16, f32x16)
def exp(b, x):
    """e ** x, for x up to 88; 0 below -87."""
    return emit_exp2(b, b.fmul(x, constant(F32_16, LOG2_E)))


@_emits(f32x16, f32x16)
def sigmoid(b, x):
    """1 / (1 + e ** -x)."""
    limited = b.call(function(b, f"llvm.maxnum.v{LANES}f32", F32_16, [F32_16] * 2), [x, constant(F32_16, -87.0)])
    other = emit_exp2(b, b.fmul(limited, constant(F32_16, -LOG2_E)))
    return b.fdiv(constant(F32_16, 1.0), b.fadd(constant(F32_16, 1.0), other))


@_emits(f32x16, f32x16)
def tanh(b, x):
    """tanh(x) = 1 - 2 / (e ** 2x + 1), with x limited to 20 either way, where it is 1 in float32."""
    for name, bound in (("maxnum", -20.0), ("minnum", 20.0)):
        x = b.call(function(b, f"llvm.{name}.v{LANES}f32", F32_16, [F32_16] * 2), [x, constant(F32_16, bound)])
    power = emit_exp2(b, b.fmul(x, constant(F32_16, 2 * LOG2_E)))
    two = b.fdiv(constant(F32_16, 2.0), b.fadd(power, constant(F32_16, 1.0)))
    return b.fsub(constant(F32_16, 1.0), two)


# 1 / 3, 1 / 5, ... of the series of atanh, from the last one down
_ATANH_FACTORS = tuple(1.0 / (2 * term + 1) for term in range(8, 0, -1))


@_emits(f32x16, f32x16)
def log1p(b, x):
    """log(1 + x) for x from 0 to 1, with all of a small x's digits: 2 atanh(z), where z = x / (2 + x) is at most 1 / 3."""
    z = b.fdiv(x, b.fadd(x, constant(F32_16, 2.0)))
    square = b.fmul(z, z)
    total = constant(F32_16, _ATANH_FACTORS[0])
    for factor in _ATANH_FACTORS[1:]:
        total = multiply_add(b, total, square, constant(F32_16, factor))
    double = b.fadd(z, z)
    return multiply_add(b, b.fmul(total, square), double, double)


@_emits(f32x16, f32x16)
def vector_sqrt(b, x):
    """Square roots."""
    return b.call(function(b, f"llvm.sqrt.v{LANES}f32", F32_16, [F32_16]), [x])


@_emits(f32x16, f32x16, f32x16)
def keep_nan(b, result, x):
    """`result`, but NaN in the lanes where `x` is NaN: `exp`, `sigmoid` and others do not care for NaN."""
    return b.select(b.fcmp_unordered("uno", x, x), x, result)


# pi / 2 as the sum of three numbers, the first two with so few bits that their products with a number of turns are exact
_HALF_PI_PARTS = (1.5703125, 4.837512969970703e-4, 7.549789954891882e-8)
_SINE_FACTORS = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)  # x ** 3 times these, from x ** 4 down
_COSINE_FACTORS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)  # x ** 4 times these


def emit_sine(b: ir.IRBuilder, x: ir.Value, quarters: int) -> ir.Value:
    """sin(x + quarters * pi / 2) within 1e-7, for x up to some millions."""
    rint = function(b, f"llvm.rint.v{LANES}f32", F32_16, [F32_16])
    quarter = constant(I32_16, quarters)
    for _ in range(2):  # the first number of quarter turns is one too high or too low for some large x
        turns = b.call(rint, [b.fmul(x, constant(F32_16, 0.6366197723675814))])
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


@_emits(f32x16, f32x16)
def sine(b, x):
    """sin(x) within 1e-7, for x up to some millions."""
    return emit_sine(b, x, 0)


@_emits(f32x16, f32x16)
def cosine(b, x):
    """cos(x) within 1e-7, for x up to some millions."""
    return emit_sine(b, x, 1)


@_emits(f32x16, f32x16)
def logarithm(b, x):
    """The natural logarithm of numbers from 2 ** -126 up, within 1e-7 of its value, or of 1."""
    bits = b.sub(b.bitcast(x, I32_16), constant(I32_16, 0x3F3504F3))  # the bits of sqrt(1 / 2)
    exponent = b.ashr(bits, constant(I32_16, 23))
    mantissa = b.bitcast(b.sub(b.bitcast(x, I32_16), b.shl(exponent, constant(I32_16, 23))), F32_16)
    z = b.fdiv(b.fsub(mantissa, constant(F32_16, 1.0)), b.fadd(mantissa, constant(F32_16, 1.0)))
    square = b.fmul(z, z)
    total = constant(F32_16, 1 / 9)
    for factor in (1 / 7, 1 / 5, 1 / 3):
        total = multiply_add(b, total, square, constant(F32_16, factor))
    double = b.fadd(z, z)
    of_mantissa = multiply_add(b, b.fmul(total, square), double, double)
    whole = b.sitofp(exponent, F32_16)
    low = multiply_add(b, whole, constant(F32_16, -2.12194440e-4), of_mantissa)
    return multiply_add(b, whole, constant(F32_16, 0.693359375), low)


@_emits(f32x16, f32x16)
def vector_floor(b, x):
    """Rounded down."""
    return b.call(function(b, f"llvm.floor.v{LANES}f32", F32_16, [F32_16]), [x])


@_emits(f32x16, f32x16)
def swap_neighbours(b, x):
    """Lanes 1, 0, 3, 2 and so on: the two of each pair change places."""
    return shuffle(b, x, x, [lane ^ 1 for lane in range(LANES)])


@_emits(_f, f32x16)
def lane_sum(b, x):
    """The sum of the lanes, in a fixed order."""
    return horizontal_sum(b, x)


@_emits(f32x16, f32x16, f32x16)
def vector_max_or_nan(b, x, y):
    """The larger of each two lanes; NaN wins."""
    larger = b.select(b.fcmp_ordered(">", y, x), y, x)
    return b.select(b.fcmp_unordered("uno", y, y), y, larger)


@_emits(_f, f32x16)
def lane_max(b, x):
    """The largest lane."""
    return b.call(function(b, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [F32_16]), [x])


def _add_pairs(b, x, distance):
    """x[lane] + x[lane + distance] in the first lane of each pair, and their difference in the second."""
    other = shuffle(b, x, x, [lane ^ distance for lane in range(LANES)])
    signs = ir.Constant(F32_16, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
    return b.fadd(b.fmul(x, signs), other)


@_emits(f32x16, f32x16)
def add_pairs_1(b, x):
    """Sums and differences of neighbours."""
    return _add_pairs(b, x, 1)


@_emits(f32x16, f32x16)
def add_pairs_2(b, x):
    """Sums and differences of lanes that are 2 apart."""
    return _add_pairs(b, x, 2)


@_emits(f32x16, f32x16)
def add_pairs_4(b, x):
    """Sums and differences of lanes that are 4 apart."""
    return _add_pairs(b, x, 4)


@_emits(f32x16, f32x16)
def add_pairs_8(b, x):
    """Sums and differences of lanes that are 8 apart."""
    return _add_pairs(b, x, 8)


@_emits(f32x16, f32x16, _i, _f)
def keep_part(b, x, count, other):
    """The first `count` lanes of `x`, and `other` in the lanes behind them."""
    return b.select(_mask(b, count), x, broadcast(b, other, F32_16))


# --- masks: an int64 with one bit for each lane, bit 0 for lane 0


def _bits_of(b, lanes):
    return b.zext(b.bitcast(lanes, I16), I64)


@_emits(_i, f32x16, f32x16)
def lanes_greater(b, x, y):
    """The mask of lanes where x > y; NaN is not greater, and nothing is greater than NaN."""
    return _bits_of(b, b.fcmp_ordered(">", x, y))


@_emits(_i, f32x16, f32x16)
def lanes_at_least(b, x, y):
    """The mask of lanes where x >= y."""
    return _bits_of(b, b.fcmp_ordered(">=", x, y))


@_emits(f32x16, f32x16, _i, _f)
def keep_lanes(b, x, mask, other):
    """`x` in the lanes of a mask, and `other` in the others."""
    lanes = b.bitcast(b.trunc(mask, I16), ir.VectorType(I1, LANES))
    return b.select(lanes, x, broadcast(b, other, F32_16))


@_emits(_i, _i)
def count_bits(b, mask):
    """How many bits of a mask are set."""
    return b.call(function(b, "llvm.ctpop.i64", I64, [I64]), [mask])


@_emits(_i, _i)
def lowest_bit(b, mask):
    """The number of the lowest bit that is set, of at least one."""
    return b.call(function(b, "llvm.cttz.i64", I64, [I64, I1]), [mask, ir.Constant(I1, 1)])


# --- scalars


@_emits(_i, _i)
def load_i64(b, address):
    """An int64."""
    return load(b, address, I64, 8)


@_emits(types.void, _i, _i)
def store_i64(b, address, x):
    """Store an int64."""
    store(b, x, address, 8)


@_emits(_i, _i)
def load_i32(b, address):
    """An int32, as int64."""
    return b.sext(load(b, address, I32, 4), I64)


@_emits(types.void, _i, _i)
def store_i32(b, address, x):
    """Store the low 32 bits."""
    store(b, b.trunc(x, I32), address, 4)


@_emits(_i, _i)
def load_u8(b, address):
    """A byte, as int64."""
    return b.zext(load(b, address, I8, 1), I64)


@_emits(types.void, _i, _i)
def store_u8(b, address, x):
    """Store the low 8 bits."""
    store(b, b.trunc(x, I8), address, 1)


@_emits(_f, _i)
def load_scalar_f32(b, address):
    """A float32."""
    return load(b, address, F32, 4)


@_emits(types.void, _i, _f)
def store_scalar_f32(b, address, x):
    """Store a float32."""
    store(b, x, address, 4)


@_emits(_f, _i)
def load_scalar_bf16(b, address):
    """A bfloat16, as float32."""
    return b.bitcast(b.shl(b.zext(load(b, address, I16, 2), I32), int32(16)), F32)


@_emits(_f, _i)
def load_scalar_f16(b, address):
    """A float16, as float32."""
    return b.fpext(load(b, address, F16, 2), F32)


LOAD_SCALAR = {"f32": load_scalar_f32, "bf16": load_scalar_bf16, "f16": load_scalar_f16}


@_emits(_f, _i)
def float_of_bits(b, word):
    """The float32 whose bits are the low 32 of an argument word (`launch.float_bits`)."""
    return b.bitcast(b.trunc(word, I32), F32)


def _turn_negative(b, bits):
    return b.select(b.icmp_signed("<", bits, int32(0)), b.xor(bits, int32(0x7FFFFFFF)), bits)


@_emits(_i, _f)
def sort_key(b, x):
    """An integer in the order of float32 numbers; neighbouring integers are neighbouring numbers."""
    return b.sext(_turn_negative(b, b.bitcast(x, I32)), I64)


@_emits(_f, _i)
def float_of_sort_key(b, key):
    """The float32 with this sort key."""
    return b.bitcast(_turn_negative(b, b.trunc(key, I32)), F32)


@_emits(_d, _i)
def load_scalar_f64(b, address):
    """A float64."""
    return load(b, address, F64, 8)


@_emits(types.void, _i, _d)
def store_scalar_f64(b, address, x):
    """Store a float64."""
    store(b, x, address, 8)


@_emits(_f, _f)
def sqrt(b, x):
    """The square root."""
    return b.call(function(b, "llvm.sqrt.f32", F32, [F32]), [x])


# --- memory and threads


@_emits(_i, _i)
def unchecked_i64(b, address):
    """An int64 of a kernel's arguments or of its thread, which checked kernels do not compare."""
    return b.load(b.inttoptr(address, ir.PointerType(I64)), align=8)


@_emits(_i, _i, _i)
def argument(b, arguments, index):
    """Argument word `index` of a kernel."""
    address = b.add(arguments, b.mul(index, int64(8)))
    return b.load(b.inttoptr(address, ir.PointerType(I64)), align=8)


@_emits(types.void, _i, _i)
def store_i64_unchecked(b, address, x):
    """Store an int64 of a thread or of the pool."""
    b.store(x, b.inttoptr(address, ir.PointerType(I64)), align=8)


def emit_prefetch(b: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for a cache line that is read soon; any address is allowed."""
    byte = ir.PointerType(I8)
    fetch = function(b, "llvm.prefetch.p0", ir.VoidType(), [byte, I32, I32, I32])
    b.call(fetch, [b.inttoptr(address, byte), int32(0), int32(3), int32(1)])


@_emits(types.void, _i)
def prefetch(b, address):
    """Ask for a cache line that is read soon; any address is allowed."""
    emit_prefetch(b, address)


@_emits(_i, _i)
def atomic_load(b, address):
    """Load an int64; what was stored before by the thread that released it is visible."""
    return b.load_atomic(b.inttoptr(address, ir.PointerType(I64)), "acquire", 8)


@_emits(types.void, _i, _i)
def atomic_store(b, address, x):
    """Store an int64 and release what was stored before."""
    b.store_atomic(x, b.inttoptr(address, ir.PointerType(I64)), "release", 8)


@_emits(_i, _i, _i)
def atomic_add(b, address, x):
    """Add to an int64; return what it was."""
    return b.atomic_rmw("add", b.inttoptr(address, ir.PointerType(I64)), x, "seq_cst")


@_emits(types.boolean, _i, _i, _i)
def compare_and_swap(b, address, old, new):
    """Replace `old` by `new` at an address; whether it was `old`."""
    pair = b.cmpxchg(b.inttoptr(address, ir.PointerType(I64)), old, new, "seq_cst", "seq_cst")
    return b.extract_value(pair, 1)


@_emits(types.void)
def pause(b):
    """Tell the processor that this is a spinning loop."""
    if cpu_target().x86:
        b.call(function(b, "llvm.x86.sse2.pause", ir.VoidType(), []), [])


@_emits(types.void, _i, _i, _i)
def call(b, kernel, arguments, thread):
    """Call a compiled kernel by its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64])
    b.call(b.inttoptr(kernel, ir.PointerType(kind)), [arguments, thread])


system_call = types.ExternalFunction("syscall", _i(_i, _i, _i, _i, _i, _i, _i))

"""Vectors for kernels that numba compiles: types of 16 lanes, loads and stores at raw addresses, products and reductions.

A kernel is a Python function over integers (addresses in bytes), scalars and these vectors. A vector lives in a register; it is
made by `load_*` and `splat`, and combined by `+ - *` and the functions here, numba's intrinsics over the LLVM code of
`vector_code.py`, which also says what a part, a pair and a quad are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import (
    F16,
    F32,
    F32_16,
    F64,
    I1,
    I8,
    I16,
    I32,
    I32_16,
    I64,
    LANES,
    broadcast,
    constant,
    dot_pairs,
    emit_exp2,
    emit_load,
    emit_load_part,
    emit_prefetch,
    emit_sine,
    emit_store_part,
    emit_weight,
    function,
    horizontal_sum,
    int32,
    int64,
    lane_mask,
    load,
    multiply_add,
    round_bf16,
    shuffle,
    store,
)


class Vector(types.Type):
    """Numba's type of a vector of 16 lanes of float32 or int32."""

    def __init__(self, element: str) -> None:
        super().__init__(name=f"{element}x{LANES}")


f32x16, i32x16 = Vector("float32"), Vector("int32")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Vector) -> None:
        super().__init__(manager, numba_type, F32_16 if numba_type is f32x16 or numba_type == f32x16 else I32_16)


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
    emit_store_part(b, address, x, count, "f32")


@_emits(types.void, _i, f32x16, _i)
def store_part_bf16(b, address, x, count):
    """Round the first `count` lanes to bfloat16 and store them."""
    emit_store_part(b, address, round_bf16(b, x), count, "i16")


@_emits(types.void, _i, f32x16, _i)
def store_part_f16(b, address, x, count):
    """Round the first `count` lanes to float16 and store them."""
    half = b.bitcast(b.fptrunc(x, ir.VectorType(F16, LANES)), ir.VectorType(I16, LANES))
    emit_store_part(b, address, half, count, "i16")


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


@_emits(f32x16, f32x16)
def exp2(b, x):
    """2 ** x, for x up to 127; 0 below -126."""
    return emit_exp2(b, x)


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
    return b.select(lane_mask(b, count), x, broadcast(b, other, F32_16))


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

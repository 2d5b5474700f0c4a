"""The functions that kernels call (`language.py`): vectors of 16 lanes, loads and stores at raw addresses, masks, atomics.

A kernel is a Python function over integers (addresses in bytes), scalars and vectors of float32. A vector lives in a register;
`load` functions and `splat` make one, and `+ - * /` and the functions here combine them. Memory may hold other dtypes: tables have
a function for each dtype, such as `LOAD["bf16"]`. `vector_code.py` emits the LLVM code of the larger functions.

- part: the first `count` of 16 lanes, for widths that are not multiples of 16; other lanes are 0 and their memory is not touched.
- mask: an integer with one bit for each lane, bit 0 for lane 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from transom_kernels.cpu.language import BOOL, DOUBLE, FLOAT, FLOATS, INT, INTS, NOTHING, emits, inlined
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import (
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
    emit_exp2,
    emit_load,
    emit_load_part,
    emit_sine,
    emit_store,
    emit_store_part,
    emit_weight,
    function,
    horizontal_sum,
    int32,
    int64,
    lane_mask,
    lanewise,
    load,
    multiply_add,
    rounded,
    shuffle,
    store,
    widened,
)

# --- rows of numbers in memory, by dtype


def _of_dtypes(make: Callable[[str], Any]) -> dict[str, Any]:
    return {dtype: make(dtype) for dtype in ("f32", "bf16", "f16")}


def _load_scalar(b, address, dtype):
    kind = F32 if dtype == "f32" else I16
    return widened(b, load(b, address, kind, NUM_BYTES[dtype]), dtype)


NUM_BYTES = {"f32": 4, "bf16": 2, "f16": 2}

LOAD = _of_dtypes(lambda dtype: emits(FLOATS, INT)(partial(emit_load, dtype=dtype)))
"""load(address): 16 numbers, in float32."""

LOAD_PART = _of_dtypes(lambda dtype: emits(FLOATS, INT, INT)(partial(emit_load_part, dtype=dtype)))
"""load_part(address, count): the first `count` of 16 numbers, in float32."""

STORE = _of_dtypes(lambda dtype: emits(NOTHING, INT, FLOATS)(partial(emit_store, dtype=dtype)))
"""store(address, x): round to the dtype and store."""

STORE_PART = _of_dtypes(lambda dtype: emits(NOTHING, INT, FLOATS, INT)(partial(emit_store_part, dtype=dtype)))
"""store_part(address, x, count): round to the dtype and store the first `count` lanes."""

ROUND = _of_dtypes(lambda dtype: emits(FLOATS, FLOATS)(partial(rounded, dtype=dtype)))
"""round(x): the nearest numbers of the dtype, in float32."""

LOAD_SCALAR = _of_dtypes(lambda dtype: emits(FLOAT, INT)(partial(_load_scalar, dtype=dtype)))
"""load_scalar(address): one number."""

load_f32, load_part_f32, load_scalar_f32 = LOAD["f32"], LOAD_PART["f32"], LOAD_SCALAR["f32"]
store_f32, store_part_f32, store_bf16 = STORE["f32"], STORE_PART["f32"], STORE["bf16"]


def _load_lanes(dtype: str) -> Any:
    load_all, load_part = LOAD[dtype], LOAD_PART[dtype]

    @inlined
    def load_lanes(address, count):
        return load_all(address) if count >= 16 else load_part(address, count)

    return load_lanes


def _store_lanes(dtype: str) -> Any:
    store_all, store_part = STORE[dtype], STORE_PART[dtype]

    @inlined
    def store_lanes(address, x, count):
        if count >= 16:
            store_all(address, x)
        else:
            store_part(address, x, count)

    return store_lanes


LOAD_LANES, STORE_LANES = _of_dtypes(_load_lanes), _of_dtypes(_store_lanes)
"""load(address, count) and store(address, x, count) of the first `count` of 16 numbers, or of all if `count` is 16 or more."""


def row_access(dtype: str) -> tuple[Any, Any, int]:
    """Return LOAD_LANES and STORE_LANES of a dtype, for loops over a row of any width, and the bytes of a number."""
    return LOAD_LANES[dtype], STORE_LANES[dtype], NUM_BYTES[dtype]


@emits(INTS, INT)
def load_words(b, address):
    """Load 16 words of 32 bits."""
    return load(b, address, I32_16, 4)


@emits(NOTHING, INT, INTS)
def store_words(b, address, x):
    """Store 16 words of 32 bits."""
    store(b, x, address, 4)


# --- arithmetic

fma, lane_sum = multiply_add, horizontal_sum


@emits(FLOATS, FLOAT)
def splat(b, x):
    """Return a vector with `x` in every lane."""
    return broadcast(b, x, F32_16)


@emits(FLOATS, FLOATS, FLOATS)
def vector_max(b, x, y):
    """Return the larger number of each pair of lanes; a number wins over NaN."""
    return lanewise(b, "maxnum", x, y)


@emits(FLOATS, FLOATS, FLOATS)
def vector_min(b, x, y):
    """Return the smaller number of each pair of lanes; a number wins over NaN."""
    return lanewise(b, "minnum", x, y)


@emits(FLOATS, FLOATS, FLOATS)
def vector_max_or_nan(b, x, y):
    """Return the larger number of each pair of lanes; NaN wins over numbers."""
    larger = b.select(b.fcmp_ordered(">", y, x), y, x)
    return b.select(b.fcmp_unordered("uno", y, y), y, larger)


@emits(FLOATS, FLOATS)
def vector_abs(b, x):
    """Return absolute values."""
    return lanewise(b, "fabs", x)


@emits(FLOATS, FLOATS)
def vector_sqrt(b, x):
    """Return square roots."""
    return lanewise(b, "sqrt", x)


@emits(FLOATS, FLOATS)
def vector_floor(b, x):
    """Round down."""
    return lanewise(b, "floor", x)


@emits(FLOATS, FLOATS, FLOATS)
def keep_nan(b, result, x):
    """Return `result`, with NaN in the lanes where `x` is NaN: `exp`, `sigmoid` and others do not propagate NaN."""
    return b.select(b.fcmp_unordered("uno", x, x), x, result)


# --- functions of float32

exp2 = emit_exp2

weight_f32, weight_bf16 = (emits(FLOATS, FLOATS)(partial(emit_weight, degree=degree)) for degree in (5, 3))
"""weight(x) is 2 ** x for finite x up to 0. `weight_f32` has the precision of float32, `weight_bf16` more than bfloat16's."""

sine, cosine = (emits(FLOATS, FLOATS)(partial(emit_sine, quarters=quarters)) for quarters in (0, 1))
"""sine(x) and cosine(x), with errors of at most 1e-7 for x up to some millions."""


LOG2_E = 1.4426950408889634


@emits(FLOATS, FLOATS)
def exp(b, x):
    """Return e ** x for x up to 88; 0 for x below -87."""
    return emit_exp2(b, b.fmul(x, constant(F32_16, LOG2_E)))


@emits(FLOATS, FLOATS)
def sigmoid(b, x):
    """Return 1 / (1 + e ** -x)."""
    limited = lanewise(b, "maxnum", x, constant(F32_16, -87.0))
    other = emit_exp2(b, b.fmul(limited, constant(F32_16, -LOG2_E)))
    return b.fdiv(constant(F32_16, 1.0), b.fadd(constant(F32_16, 1.0), other))


@emits(FLOATS, FLOATS)
def tanh(b, x):
    """Return tanh(x) = 1 - 2 / (e ** 2x + 1). x is clamped to [-20, 20], since tanh(20) is 1 in float32."""
    x = lanewise(b, "minnum", lanewise(b, "maxnum", x, constant(F32_16, -20.0)), constant(F32_16, 20.0))
    power = emit_exp2(b, b.fmul(x, constant(F32_16, 2 * LOG2_E)))
    two = b.fdiv(constant(F32_16, 2.0), b.fadd(power, constant(F32_16, 1.0)))
    return b.fsub(constant(F32_16, 1.0), two)


def _double_atanh(b, z, num_factors):
    """Return 2 atanh(z) = 2 (z + z ** 3 / 3 + z ** 5 / 5 ...), with terms up to z ** (2 `num_factors` + 1)."""
    square, double = b.fmul(z, z), b.fadd(z, z)
    total = constant(F32_16, 1 / (2 * num_factors + 1))
    for term in range(num_factors - 1, 0, -1):
        total = multiply_add(b, total, square, constant(F32_16, 1 / (2 * term + 1)))
    return multiply_add(b, b.fmul(total, square), double, double)


@emits(FLOATS, FLOATS)
def log1p(b, x):
    """Return log(1 + x) for x from 0 to 1, precise even for small x: 2 atanh(z), where z = x / (2 + x) is at most 1 / 3."""
    return _double_atanh(b, b.fdiv(x, b.fadd(x, constant(F32_16, 2.0))), 8)


@emits(FLOATS, FLOATS)
def logarithm(b, x):
    """Return the natural logarithm of numbers from 2 ** -126 up. The error is at most 1e-7 times the larger of result and 1.

    x = 2 ** exponent * mantissa with a mantissa between sqrt(1 / 2) and sqrt(2), whose logarithm is 2 atanh(z) with
    z = (mantissa - 1) / (mantissa + 1).
    """
    bits = b.sub(b.bitcast(x, I32_16), constant(I32_16, 0x3F3504F3))  # the bits of sqrt(1 / 2)
    exponent = b.ashr(bits, constant(I32_16, 23))
    mantissa = b.bitcast(b.sub(b.bitcast(x, I32_16), b.shl(exponent, constant(I32_16, 23))), F32_16)
    z = b.fdiv(b.fsub(mantissa, constant(F32_16, 1.0)), b.fadd(mantissa, constant(F32_16, 1.0)))
    whole = b.sitofp(exponent, F32_16)
    # log(2) as the sum of two numbers; the first has few bits, so that its product with an exponent is exact
    low = multiply_add(b, whole, constant(F32_16, -2.12194440e-4), _double_atanh(b, z, 4))
    return multiply_add(b, whole, constant(F32_16, 0.693359375), low)


# --- lanes


@emits(FLOATS, FLOATS)
def swap_neighbours(b, x):
    """Swap the two lanes of each pair of neighbours: 1, 0, 3, 2 and so on."""
    return shuffle(b, x, x, [lane ^ 1 for lane in range(LANES)])


def _add_pairs(b, x, distance):
    other = shuffle(b, x, x, [lane ^ distance for lane in range(LANES)])
    signs = ir.Constant(F32_16, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
    return b.fadd(b.fmul(x, signs), other)


ADD_PAIRS = {distance: emits(FLOATS, FLOATS)(partial(_add_pairs, distance=distance)) for distance in (1, 2, 4, 8)}
"""Distance -> add_pairs(x): of each two lanes that are `distance` apart, the first gets their sum, the second their difference."""


@emits(FLOAT, FLOATS)
def lane_max(b, x):
    """Return the largest lane."""
    return b.call(function(b, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [F32_16]), [x])


@emits(FLOATS, FLOATS, INT, FLOAT)
def keep_part(b, x, count, other):
    """Return the first `count` lanes of `x`, with `other` in the lanes after them."""
    return b.select(lane_mask(b, count), x, broadcast(b, other, F32_16))


# --- masks


def _bits_of(b, lanes):
    return b.zext(b.bitcast(lanes, I16), I64)


@emits(INT, FLOATS, FLOATS)
def lanes_greater(b, x, y):
    """Return the mask of lanes where x > y; NaN is not greater, and nothing is greater than NaN."""
    return _bits_of(b, b.fcmp_ordered(">", x, y))


@emits(INT, FLOATS, FLOATS)
def lanes_at_least(b, x, y):
    """Return the mask of lanes where x >= y; a lane with NaN is not in it."""
    return _bits_of(b, b.fcmp_ordered(">=", x, y))


@emits(FLOATS, FLOATS, INT, FLOAT)
def keep_lanes(b, x, mask, other):
    """Return `x` in the lanes of a mask, and `other` in the rest."""
    lanes = b.bitcast(b.trunc(mask, I16), ir.VectorType(I1, LANES))
    return b.select(lanes, x, broadcast(b, other, F32_16))


@emits(INT, INT)
def count_bits(b, mask):
    """Return how many bits of a mask are set."""
    return b.call(function(b, "llvm.ctpop.i64", I64, [I64]), [mask])


@emits(INT, INT)
def lowest_bit(b, mask):
    """Return the number of the lowest set bit; at least one must be set."""
    return b.call(function(b, "llvm.cttz.i64", I64, [I64, I1]), [mask, ir.Constant(I1, 1)])


# --- scalars


@emits(INT, INT)
def load_i64(b, address):
    """Load an int64."""
    return load(b, address, I64, 8)


@emits(NOTHING, INT, INT)
def store_i64(b, address, x):
    """Store an int64."""
    store(b, x, address, 8)


@emits(INT, INT)
def load_i32(b, address):
    """Load an int32, as int64."""
    return b.sext(load(b, address, I32, 4), I64)


@emits(NOTHING, INT, INT)
def store_i32(b, address, x):
    """Store the low 32 bits."""
    store(b, b.trunc(x, I32), address, 4)


@emits(INT, INT)
def load_u8(b, address):
    """Load a byte, as int64."""
    return b.zext(load(b, address, I8, 1), I64)


@emits(NOTHING, INT, INT)
def store_u8(b, address, x):
    """Store the low 8 bits."""
    store(b, b.trunc(x, I8), address, 1)


@emits(NOTHING, INT, FLOAT)
def store_scalar_f32(b, address, x):
    """Store a float32."""
    store(b, x, address, 4)


@emits(DOUBLE, INT)
def load_scalar_f64(b, address):
    """Load a float64."""
    return load(b, address, F64, 8)


@emits(NOTHING, INT, DOUBLE)
def store_scalar_f64(b, address, x):
    """Store a float64."""
    store(b, x, address, 8)


@emits(FLOAT, DOUBLE)
def float32(b, x):
    """Return the float32 nearest to a float64 or an integer."""
    return b.fptrunc(x, F32)


@emits(FLOAT, INT)
def float_of_bits(b, word):
    """Return the float32 whose bits are the low 32 of an argument word (`arguments.float_bits`)."""
    return b.bitcast(b.trunc(word, I32), F32)


def _turn_negative(b, bits):
    return b.select(b.icmp_signed("<", bits, int32(0)), b.xor(bits, int32(0x7FFFFFFF)), bits)


@emits(INT, FLOAT)
def sort_key(b, x):
    """Return an integer for a float32. Integers are ordered as their floats, and neighbouring floats have neighbouring integers."""
    return b.sext(_turn_negative(b, b.bitcast(x, I32)), I64)


@emits(FLOAT, INT)
def float_of_sort_key(b, key):
    """Return the float32 with this sort key."""
    return b.bitcast(_turn_negative(b, b.trunc(key, I32)), F32)


@emits(FLOAT, FLOAT)
def sqrt(b, x):
    """Return the square root."""
    return b.call(function(b, "llvm.sqrt.f32", F32, [F32]), [x])


# --- words of arguments and threads, which checked kernels do not check


def _word_at(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.inttoptr(address, ir.PointerType(I64))


@emits(INT, INT)
def unchecked_i64(b, address):
    """Load an int64 of a kernel's arguments or of its thread."""
    return b.load(_word_at(b, address), align=8)


@emits(NOTHING, INT, INT)
def store_i64_unchecked(b, address, x):
    """Store an int64 of a thread or of the pool."""
    b.store(x, _word_at(b, address), align=8)


@emits(INT, INT, INT)
def argument(b, arguments, index):
    """Return argument word `index` of a kernel."""
    return b.load(_word_at(b, b.add(arguments, b.mul(index, int64(8)))), align=8)


@emits(FLOAT, INT, INT)
def float_argument(b, arguments, index):
    """Return argument word `index` of a kernel, whose low 32 bits are a float32 (`arguments.float_bits`)."""
    word = b.load(_word_at(b, b.add(arguments, b.mul(index, int64(8)))), align=8)
    return b.bitcast(b.trunc(word, I32), F32)


@emits(INT, INT)
def atomic_load(b, address):
    """Load an int64 (acquire): everything stored by the thread that released the value, before it did so, is then visible."""
    return b.load_atomic(_word_at(b, address), "acquire", 8)


@emits(NOTHING, INT, INT)
def atomic_store(b, address, x):
    """Store an int64 (release): everything that this thread stored before becomes visible with it."""
    b.store_atomic(x, _word_at(b, address), "release", 8)


@emits(INT, INT, INT)
def atomic_add(b, address, x):
    """Add to an int64; return its value before."""
    return b.atomic_rmw("add", _word_at(b, address), x, "seq_cst")


@emits(BOOL, INT, INT, INT)
def compare_and_swap(b, address, old, new):
    """Replace `old` by `new` at an address; return whether `old` was there."""
    return b.extract_value(b.cmpxchg(_word_at(b, address), old, new, "seq_cst", "seq_cst"), 1)


# --- the processor and the system


@emits(NOTHING)
def pause(b):
    """Tell the processor that this is a spinning loop."""
    if cpu_target().x86:
        b.call(function(b, "llvm.x86.sse2.pause", ir.VoidType(), []), [])


@emits(NOTHING, INT, INT, INT)
def call(b, kernel, arguments, thread):
    """Call a compiled kernel by its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64])
    b.call(b.inttoptr(kernel, ir.PointerType(kind)), [arguments, thread])


@emits(INT, *[INT] * 7)
def system_call(b, *arguments):
    """Make a Linux system call; the arguments are its number, then its six parameters."""
    return b.call(function(b, "syscall", I64, [I64] * 7), arguments)

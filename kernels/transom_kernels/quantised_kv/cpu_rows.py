"""Loads rows of quantised caches in CPU kernels, dequantising in registers, and quantises and stores rows.

A cache's *stored* type is "f32", "bf16" or "f16" if it is not quantised, and "i8", "e4m3" or "i4" for the formats int8, fp8 and
int4 (`format.py`). Loads return stored numbers, without the row's scale: kernels multiply products by the scale afterwards.

Legend: D numbers of a row.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from transom_kernels.cpu.bounds import checked_address
from transom_kernels.cpu.language import FLOATS, INT, NOTHING, emits
from transom_kernels.cpu.simd import (
    NUM_BYTES,
    keep_part,
    lane_max,
    lane_sum,
    load_f32,
    splat,
    store_f32,
    store_scalar_f32,
    vector_abs,
    vector_max,
)
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import (
    F32,
    F32_16,
    I1,
    I8,
    I16,
    I32,
    I32_16,
    LANES,
    bf16_pairs,
    broadcast,
    constant,
    function,
    half_to_float,
    int32,
    int64,
    load,
    look_up_halves,
    shuffle,
    store,
)
from transom_kernels.cpu.work import argument, helper

LARGEST = {"i8": 127.0, "e4m3": 448.0, "i4": 7.0}
_BITS = {**{name: 8 * size for name, size in NUM_BYTES.items()}, "i8": 8, "e4m3": 8, "i4": 4}
_I16_16 = ir.VectorType(I16, LANES)


@helper
def cache_address(arguments, cache, block, offset, head):
    """Return the address of a row, or of its scale. `cache` has the numbers of the words of a `CacheArguments`."""
    place = block * argument(arguments, cache.block) + offset * argument(arguments, cache.token)
    return argument(arguments, cache.cache) + place + head * argument(arguments, cache.head)


def row_bytes(stored: str, width: int) -> int:
    """Return the bytes of `width` stored numbers."""
    return width * _BITS[stored] // 8


def load_first(b, address, vector, count: int):
    """Load the first `count` elements of a vector; the memory of the others is not read, and they become 0."""
    size = vector.element.width // 8 if isinstance(vector.element, ir.IntType) else 4
    align = min(size, 4) if vector.element is F32 else min(size, 2)
    if count == vector.count:
        return load(b, address, vector, align)
    name = f"i{8 * size}" if isinstance(vector.element, ir.IntType) else "f32"
    masks = ir.VectorType(I1, vector.count)
    pointer = b.inttoptr(checked_address(b, address, int64(count * size)), ir.PointerType(vector))
    masked = function(b, f"llvm.masked.load.v{vector.count}{name}.p0", vector, [pointer.type, I32, masks, vector])
    mask = ir.Constant(masks, [index < count for index in range(vector.count)])
    return b.call(masked, [pointer, int32(align), mask, constant(vector, 0)])


def emit_numbers(b, address, stored: str, count: int = LANES):
    """Load the first `count` of 16 stored numbers as float32, exactly; the other lanes hold any finite numbers.

    `address` must be that of a number with an even index in its row, since int4 packs two numbers into a byte.
    """
    if stored == "f32":
        return load_first(b, address, F32_16, count)
    if stored == "i4":
        both = load_first(b, address, ir.VectorType(I8, LANES // 2), (count + 1) // 2)
        codes = b.zext(shuffle(b, both, both, [lane // 2 for lane in range(LANES)]), I32_16)
        codes = b.and_(b.lshr(codes, ir.Constant(I32_16, [0, 4] * (LANES // 2))), constant(I32_16, 15))
        return b.sitofp(b.sub(codes, constant(I32_16, 8)), F32_16)
    if stored == "i8":
        return b.sitofp(b.sext(load_first(b, address, ir.VectorType(I8, LANES), count), I32_16), F32_16)
    if stored == "e4m3":
        # as the upper bits of a float16, the fraction is right and the number 2 ** 8 too small: exponent biases are 7 and 15
        bits = b.sext(load_first(b, address, ir.VectorType(I8, LANES), count), _I16_16)
        bits = b.and_(b.shl(bits, constant(_I16_16, 7)), constant(_I16_16, 0xBF80))
        return b.fmul(half_to_float(b, bits), constant(F32_16, 256.0))
    bits = load_first(b, address, _I16_16, count)
    if stored == "f16":
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), F32_16)
    return b.bitcast(b.shl(b.zext(bits, I32_16), constant(I32_16, 16)), F32_16)


_INT4_BF16 = [*(0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80),  # -8 to -1
              *(0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0)]  # fmt: skip


def emit_pairs(b, address, stored: str, count: int = 2 * LANES):
    """Load the first `count` of 32 stored numbers as 16 pairs of bfloat16, exactly; the other lanes hold any finite numbers."""
    if stored == "bf16":
        if count % 2:
            return b.bitcast(load_first(b, address, ir.VectorType(I16, 2 * LANES), count), I32_16)
        return load_first(b, address, I32_16, count // 2)
    if stored == "i4" and cpu_target().avx512:
        both = b.zext(load_first(b, address, ir.VectorType(I8, LANES), (count + 1) // 2), I32_16)
        codes = b.and_(b.or_(both, b.shl(both, constant(I32_16, 12))), constant(I32_16, 0x000F000F))
        return look_up_halves(b, _INT4_BF16, codes)
    first = emit_numbers(b, address, stored, min(count, LANES))
    if count <= LANES:
        return bf16_pairs(b, first, constant(F32_16, 0.0))
    return bf16_pairs(b, first, emit_numbers(b, b.add(address, int64(row_bytes(stored, LANES))), stored, count - LANES))


def emit_halves(b, address, stored: str, count: int = 2 * LANES):
    """Load the first `count` of 32 stored integers ("i8" or "i4") as 16 pairs of 16-bit integers; the others are any in range."""
    halves = ir.VectorType(I16, 2 * LANES)
    if stored == "i8":
        return b.bitcast(b.sext(load_first(b, address, ir.VectorType(I8, 2 * LANES), count), halves), I32_16)
    both = b.zext(load_first(b, address, ir.VectorType(I8, LANES), (count + 1) // 2), I32_16)
    codes = b.and_(b.or_(both, b.shl(both, constant(I32_16, 12))), constant(I32_16, 0x000F000F))
    return b.bitcast(b.sub(b.bitcast(codes, halves), constant(halves, 8)), I32_16)


def make_quantise_row(stored: str) -> Any:
    """Build quantise_row(work, place, scale_place, D, first, second): it stores work * first * second, quantised, and its scale.

    `work` is a row of D float32 in a whole number of 16-lane vectors; it is overwritten.
    """
    largest, bits, store_numbers = np.float32(LARGEST[stored]), _BITS[stored], _make_store_numbers(stored)
    zero, one = np.float32(0.0), np.float32(1.0)

    @helper
    def quantise_row(work, place, scale_place, width, first, second):
        top, undefined = splat(0.0), splat(0.0)
        for k in range(0, width, 16):
            lanes = keep_part(load_f32(work + k * 4) * first * second, width - k, 0.0)
            store_f32(work + k * 4, lanes)
            top = vector_max(top, vector_abs(lanes))
            undefined = undefined + lanes * splat(0.0)  # NaN where a number is not finite
        scale = lane_max(top) / largest + lane_sum(undefined)
        store_scalar_f32(scale_place, scale)
        divisor = splat(scale if scale > zero else one)
        for k in range(0, width, 16):
            lanes = load_f32(work + k * 4) / divisor
            if not scale > zero:
                lanes = splat(0.0)
            store_numbers(place + k * bits // 8, lanes, min(width - k, 16))

    return quantise_row


def _make_store_numbers(stored: str) -> Any:
    """Build store_numbers(place, x, count), which rounds the first `count` of 16 finite numbers and stores them."""
    largest = LARGEST[stored]

    @emits(NOTHING, INT, FLOATS, INT)
    def store_numbers(b, place, x, count):
        for name, bound in (("maxnum", -largest), ("minnum", largest)):
            x = b.call(function(b, f"llvm.{name}.v{LANES}f32", F32_16, [F32_16] * 2), [x, constant(F32_16, bound)])
        if stored == "e4m3":
            codes = _round_e4m3(b, x)
        else:
            codes = b.fptosi(b.call(function(b, f"llvm.rint.v{LANES}f32", F32_16, [F32_16]), [x]), I32_16)
        if stored == "i4":
            codes = b.add(codes, constant(I32_16, 8))
            even, odd = (shuffle(b, codes, codes, list(range(first, LANES, 2))) for first in (0, 1))
            half = ir.VectorType(I32, LANES // 2)
            codes, count = b.or_(even, b.shl(odd, constant(half, 4))), b.lshr(count, int64(1))
        _store_bytes(b, place, b.trunc(codes, ir.VectorType(I8, codes.type.count)), count)

    return store_numbers


def _store_bytes(b, place, values, count) -> None:
    """Store the first `count` bytes of a vector."""
    size = values.type.count
    is_whole = b.icmp_signed("==", count, int64(size))
    with b.if_else(is_whole) as (whole, part):
        with whole:
            store(b, values, place, 1)
        with part:
            masks = ir.VectorType(I1, size)
            lanes = ir.Constant(ir.VectorType(I32, size), list(range(size)))
            mask = b.icmp_signed("<", lanes, broadcast(b, b.trunc(count, I32), lanes.type))
            pointer = b.inttoptr(checked_address(b, place, count), ir.PointerType(values.type))
            kinds = [values.type, pointer.type, I32, masks]
            masked = function(b, f"llvm.masked.store.v{size}i8.p0", ir.VoidType(), kinds)
            b.call(masked, [values, pointer, int32(1), mask])


def _round_e4m3(b, x):
    """Return numbers from -448 to 448 as 8-bit floats (to nearest, ties to even), one in each lane of int32."""
    bits = b.bitcast(x, I32_16)
    magnitude = b.and_(bits, constant(I32_16, 0x7FFFFFFF))
    # normal numbers, from 2 ** -6 on: round the lower 20 bits of the fraction away, and change the exponent's bias from 127 to 7
    lowest = b.and_(b.lshr(magnitude, constant(I32_16, 20)), constant(I32_16, 1))
    normal = b.lshr(b.add(magnitude, b.add(lowest, constant(I32_16, 0x7FFFF))), constant(I32_16, 20))
    normal = b.sub(normal, constant(I32_16, (127 - 7) << 3))
    # smaller numbers are multiples of 2 ** -9, the spacing of subnormal numbers
    rint = function(b, f"llvm.rint.v{LANES}f32", F32_16, [F32_16])
    small = b.fptosi(b.call(rint, [b.fmul(b.bitcast(magnitude, F32_16), constant(F32_16, 512.0))]), I32_16)
    is_small = b.icmp_unsigned("<", magnitude, constant(I32_16, (127 - 6) << 23))
    sign = b.and_(b.lshr(bits, constant(I32_16, 24)), constant(I32_16, 0x80))
    return b.or_(b.select(is_small, small, normal), sign)

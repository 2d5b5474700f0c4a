"""An MoE router for CPUs, in numba: `score_experts` (logits) and `choose_experts` (top-k and weights). `cpu.py` launches them.

A logit is one chain of multiply-adds in 16 lanes along N, whatever the tile, so it does not depend on the other tokens.

Legend: T tokens, N hidden width, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import signature
from numba.extending import intrinsic

from transom_kernels.cpu.row_products import make_row_products
from transom_kernels.cpu.simd import (
    exp,
    f32x16,
    float_of_bits,
    i32x16,
    keep_nan,
    keep_part,
    lane_max,
    lane_sum,
    load_f32,
    load_i64,
    load_part_f32,
    load_scalar_f32,
    log1p,
    sigmoid,
    splat,
    store_f32,
    store_i32,
    store_i64,
    store_scalar_f32,
    store_words,
    vector_abs,
    vector_max,
    vector_sqrt,
)
from transom_kernels.cpu.vector_code import F32_16, I32, I32_16, LANES, Loop, broadcast, constant, function, int64, load
from transom_kernels.cpu.work import argument, claim, finish, scratch

_NEVER = -(2**31)  # below every key: experts that do not exist or are chosen already
_LARGEST = 2**31 - 1


def make_score_experts(dtype: str, tile_size: int, experts_per_item: int) -> Any:
    """An item is `tile_size` tokens and `experts_per_item` experts; tokens change first.

    Arguments: x [T, N], weight [E, N] float32, logits [T, E] float32, T, N, E, x's row stride in bytes, weight's row stride in
    bytes.
    """
    tile = make_row_products(dtype, tile_size)

    def score_experts(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            tokens, width, experts = argument(arguments, 3), argument(arguments, 4), argument(arguments, 5)
            x_stride, weight_stride = argument(arguments, 6), argument(arguments, 7)
            tiles = (tokens + tile_size - 1) // tile_size
            token, first = item % tiles * tile_size, item // tiles * experts_per_item
            x = argument(arguments, 0) + token * x_stride
            out = argument(arguments, 2) + token * experts * 4
            for expert in range(first, min(first + experts_per_item, experts), tile_size):
                weight = argument(arguments, 1) + expert * weight_stride
                last = min(tile_size - 1, experts - 1 - expert)
                tile(
                    x, x_stride, min(tile_size - 1, tokens - 1 - token), weight, weight_stride, last, width,
                    out + expert * 4, experts * 4,
                )  # fmt: skip
            finish(thread)
            item = claim(thread)

    return score_experts


def make_choose_experts(score: str) -> Any:
    """An item is a token.

    Arguments: logits [T, E] float32, bias [E] or 0, correction [E] or 0, expert_scale [E] or 0, chosen [T, K] or 0, experts [T, K],
    weights [T, K], E, K, whether weights are normalised, their scale, what is added to their sum. Scratch: 2 E words of 32 bits, E
    rounded up to 16.
    """
    is_softmax, is_sigmoid = score == "softmax", score == "sigmoid"
    no_logit = float("-inf")

    def choose_experts(arguments, thread):  # type: ignore[no-untyped-def]
        token = claim(thread)
        while token >= 0:
            num_experts, num_chosen = argument(arguments, 7), argument(arguments, 8)
            padded = (num_experts + LANES - 1) // LANES * LANES
            scores, keys = scratch(thread), scratch(thread) + 4 * padded
            logits = argument(arguments, 0) + token * num_experts * 4
            bias, correction = argument(arguments, 1), argument(arguments, 2)
            # logits, and the largest one
            peaks = splat(no_logit)
            for e in range(0, num_experts, LANES):
                count = min(LANES, num_experts - e)
                values = load_part_f32(logits + 4 * e, count)
                if bias != 0:
                    values = values + load_part_f32(bias + 4 * e, count)
                values = keep_part(values, count, no_logit)
                peaks = vector_max(peaks, values)
                store_f32(scores + 4 * e, values)
                if correction == 0:
                    store_words(keys + 4 * e, _keys(values, count))
            # scores
            peak, total = splat(lane_max(peaks)), splat(0.0)
            for e in range(0, num_experts, LANES):
                values = load_f32(scores + 4 * e)
                if is_softmax:
                    below = values - peak
                    values = keep_nan(exp(below), below)
                    total = total + values
                elif is_sigmoid:
                    values = keep_nan(sigmoid(values), values)
                else:
                    small = log1p(exp(splat(0.0) - vector_abs(values)))  # softplus(x) = max(x, 0) + log1p(exp(-|x|))
                    values = keep_nan(vector_sqrt(vector_max(values, splat(0.0)) + small), values)
                store_f32(scores + 4 * e, values)
            if is_softmax:
                divisor = splat(lane_sum(total))
                for e in range(0, num_experts, LANES):
                    store_f32(scores + 4 * e, load_f32(scores + 4 * e) / divisor)
            if correction != 0:
                for e in range(0, num_experts, LANES):
                    count = min(LANES, num_experts - e)
                    values = load_f32(scores + 4 * e) + load_part_f32(correction + 4 * e, count)
                    store_words(keys + 4 * e, _keys(values, count))
            # the choice
            chosen, experts = argument(arguments, 4), argument(arguments, 5) + token * num_chosen * 8
            for rank in range(num_chosen):
                if chosen != 0:
                    store_i64(experts + 8 * rank, load_i64(chosen + (token * num_chosen + rank) * 8))
                else:
                    best = _first_largest(keys, padded)
                    store_i64(experts + 8 * rank, best)
                    store_i32(keys + 4 * best, _NEVER)
            # weights
            weights, expert_scale = argument(arguments, 6) + token * num_chosen * 4, argument(arguments, 3)
            factor = 1.0 * float_of_bits(argument(arguments, 10))  # in float64
            if argument(arguments, 9) != 0:
                found = 0.0
                for rank in range(num_chosen):
                    found += load_scalar_f32(scores + 4 * load_i64(experts + 8 * rank))
                factor /= found + float_of_bits(argument(arguments, 11))
            for rank in range(num_chosen):
                expert = load_i64(experts + 8 * rank)
                weight = factor * load_scalar_f32(scores + 4 * expert)
                if expert_scale != 0:
                    weight *= load_scalar_f32(expert_scale + 4 * expert)
                store_scalar_f32(weights + 4 * rank, weight)
            finish(thread)
            token = claim(thread)

    return choose_experts


@intrinsic
def _keys(typingctx, preferences, count):  # type: ignore[no-untyped-def]
    """Integers that order experts by preference: NaN is above all, -0 equals 0. Lanes from `count` on are `_NEVER`."""

    def generate(context, b, sig, args):  # type: ignore[no-untyped-def]
        preferences, count = args
        zero = constant(F32_16, 0.0)
        bits = b.bitcast(b.fadd(preferences, zero), I32_16)
        flipped = b.xor(bits, b.and_(b.ashr(bits, constant(I32_16, 31)), constant(I32_16, _LARGEST)))
        ordered = b.select(b.fcmp_unordered("uno", preferences, zero), constant(I32_16, _LARGEST), flipped)
        lanes = ir.Constant(I32_16, list(range(LANES)))
        inside = b.icmp_signed("<", lanes, broadcast(b, b.trunc(count, I32), I32_16))
        return b.select(inside, ordered, constant(I32_16, _NEVER))

    return signature(i32x16, f32x16, types.int64), generate


@intrinsic
def _first_largest(typingctx, keys, count):  # type: ignore[no-untyped-def]
    """The index of the largest of `count` keys, a multiple of 16; of equal ones the first."""

    def generate(context, b, sig, args):  # type: ignore[no-untyped-def]
        keys, count = args
        lanes = ir.Constant(I32_16, list(range(LANES)))

        def body(k, best):  # type: ignore[no-untyped-def]
            values = load(b, b.add(keys, b.mul(k, int64(4))), I32_16, 4)
            larger = b.icmp_signed(">", values, best[0])
            index = b.add(lanes, broadcast(b, b.trunc(k, I32), I32_16))
            return [b.select(larger, values, best[0]), b.select(larger, index, best[1])]

        values, index = Loop(b, count, LANES, [constant(I32_16, _NEVER), lanes], body).results
        largest = b.call(function(b, f"llvm.vector.reduce.smax.v{LANES}i32", I32, [I32_16]), [values])
        is_best = b.icmp_signed("==", values, broadcast(b, largest, I32_16))
        index = b.select(is_best, index, constant(I32_16, _LARGEST))
        first = b.call(function(b, f"llvm.vector.reduce.smin.v{LANES}i32", I32, [I32_16]), [index])
        return b.sext(first, ir.IntType(64))

    return signature(types.int64, types.int64, types.int64), generate

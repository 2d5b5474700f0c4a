"""The MoE router on CPUs: the kernels `score_experts` (logits) and `choose_experts` (top-k and weights), and their launches.

    logits = x @ weight^T + bias,  scores = softmax, sigmoid or sqrt(softplus) of the logits
    chosen = the K largest of logits (or scores + correction),  weights = scores[chosen], normalised, * scale * expert_scale

A logit is the sum of 16 lanes, each one chain of multiply-adds along N, in the same order in every tile. So it does not depend on
the other tokens.

Legend: T tokens, N hidden width, E experts, K experts per token.
"""

from typing import Any, NamedTuple

import torch
from llvmlite import ir

from transom_kernels.cpu.arguments import RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.language import FLOATS, INT, INTS, emits
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.rows import make_row_products
from transom_kernels.cpu.simd import (
    exp,
    float_argument,
    keep_nan,
    keep_part,
    lane_max,
    lane_sum,
    load_f32,
    load_i32,
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
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import (
    F32_16,
    I32,
    I32_16,
    I64,
    LANES,
    Loop,
    broadcast,
    constant,
    function,
    int64,
    lane_mask,
    load,
)
from transom_kernels.cpu.work import argument, each_item, helper, row_address, scratch
from transom_kernels.route.reference import TINY, Routing

EXPERTS_PER_ITEM = 16
TILE = 4 if cpu_target().avx512 else 2  # tokens of a tile, and its experts: TILE ** 2 sums fill the registers

_MODULE = "transom_kernels.route.cpu"
_NEVER = -(2**31)  # the key of experts that do not exist or are chosen already; below all others
_LARGEST = 2**31 - 1
_NO_LOGIT = float("-inf")


class ScoreArguments(NamedTuple):
    """The argument words of `score_experts`."""

    x: RowArguments  # [T, N]
    weight: RowArguments  # [E, N] float32
    logits: torch.Tensor  # [T, E] float32
    num_tokens: int
    width: int
    num_experts: int


class ChooseArguments(NamedTuple):
    """The argument words of `choose_experts`."""

    logits: torch.Tensor  # [T, E] float32
    bias: torch.Tensor | None  # [E] float32
    correction: torch.Tensor | None  # [E] float32
    expert_scale: torch.Tensor | None  # [E] float32
    chosen: torch.Tensor | None  # [T, K] int64
    experts: torch.Tensor  # [T, K] int64
    weights: torch.Tensor  # [T, K] float32
    num_experts: int
    num_chosen: int
    num_groups: int
    top_groups: int
    normalise: bool
    scale: float
    tiny: float  # `reference.TINY`: added to a sum of scores before it divides


SCORE, CHOOSE = numbers_of(ScoreArguments), numbers_of(ChooseArguments)


def fits_cpu(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the kernels support tensors of this dtype and these strides."""
    return x.dtype in DTYPES and (x.stride(1) == 1 or x.shape[1] == 1) and weight.stride(1) == 1


def route_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts [T, K] int64 and weights [T, K] float32 of `x` [T, N], by the router matrix `weight` [E, N] float32.

    The module docstring has the formula. `correction` is used for the choice only; `chosen` fixes the choice.
    """
    (tokens, width), num_experts, num_chosen = x.shape, len(weight), routing.num_chosen
    logits = empty((tokens, num_experts), torch.float32)
    launch(
        cpu_kernel(
            _MODULE, "make_score_experts", dtype=DTYPES[x.dtype], tile_size=TILE, experts_per_item=EXPERTS_PER_ITEM
        ),
        -(-tokens // TILE) * -(-num_experts // EXPERTS_PER_ITEM),
        ScoreArguments(RowArguments.of(x), RowArguments.of(weight), logits, tokens, width, num_experts),
    )
    experts, weights = empty((tokens, num_chosen), torch.int64), empty((tokens, num_chosen), torch.float32)
    launch(
        cpu_kernel(_MODULE, "make_choose_experts", score=routing.score),
        tokens,
        ChooseArguments(
            logits=logits,
            bias=None if bias is None else bias.contiguous(),
            correction=None if correction is None else correction.contiguous(),
            expert_scale=None if expert_scale is None else expert_scale.contiguous(),
            chosen=None if chosen is None else chosen.contiguous(),
            experts=experts,
            weights=weights,
            num_experts=num_experts,
            num_chosen=num_chosen,
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            normalise=routing.normalise,
            scale=float(routing.scale),
            tiny=TINY,
        ),
        scratch_bytes=16 * (num_experts + LANES),
    )
    return experts, weights


def make_score_experts(dtype: str, tile_size: int, experts_per_item: int) -> Any:
    """Build the kernel of logits. A work item is `tile_size` tokens and `experts_per_item` experts; tokens vary fastest."""
    tile = make_row_products(dtype, tile_size)

    @each_item
    def score_experts(arguments, thread, item):
        tokens, experts = argument(arguments, SCORE.num_tokens), argument(arguments, SCORE.num_experts)
        tiles = (tokens + tile_size - 1) // tile_size
        token, first = item % tiles * tile_size, item // tiles * experts_per_item
        x, out = row_address(arguments, SCORE.x, token), argument(arguments, SCORE.logits) + token * experts * 4
        for expert in range(first, min(first + experts_per_item, experts), tile_size):
            last = min(tile_size - 1, experts - 1 - expert)
            tile(
                x, argument(arguments, SCORE.x.stride), min(tile_size - 1, tokens - 1 - token),
                row_address(arguments, SCORE.weight, expert), argument(arguments, SCORE.weight.stride), last,
                argument(arguments, SCORE.width), out + expert * 4, experts * 4,
            )  # fmt: skip

    return score_experts


def make_choose_experts(score: str) -> Any:
    """Build the kernel that chooses experts. A work item is a token.

    Scratch: arrays of E words of 32 bits, E rounded up to 16: the token's scores, and the keys that order its experts; with groups
    also its preferences, and the keys of groups.
    """
    write_scores, keep_best_groups = _make_scores(score), _make_groups()

    @each_item
    def choose_experts(arguments, thread, token):
        num_experts, num_chosen = argument(arguments, CHOOSE.num_experts), argument(arguments, CHOOSE.num_chosen)
        padded = (num_experts + LANES - 1) // LANES * LANES
        scores, keys = scratch(thread), scratch(thread) + 4 * padded
        preferences = keys + 4 * padded
        logits = argument(arguments, CHOOSE.logits) + token * num_experts * 4
        bias, correction = argument(arguments, CHOOSE.bias), argument(arguments, CHOOSE.correction)
        # logits, and the largest one
        peaks = splat(_NO_LOGIT)
        for e in range(0, num_experts, LANES):
            count = min(LANES, num_experts - e)
            values = load_part_f32(logits + 4 * e, count)
            if bias != 0:
                values = values + load_part_f32(bias + 4 * e, count)
            values = keep_part(values, count, _NO_LOGIT)
            peaks = vector_max(peaks, values)
            store_f32(scores + 4 * e, values)
            if correction == 0:
                store_words(keys + 4 * e, _keys(values, count))
                store_f32(preferences + 4 * e, values)
        write_scores(scores, num_experts, splat(lane_max(peaks)))
        if correction != 0:
            for e in range(0, num_experts, LANES):
                count = min(LANES, num_experts - e)
                values = load_f32(scores + 4 * e) + load_part_f32(correction + 4 * e, count)
                store_words(keys + 4 * e, _keys(values, count))
                store_f32(preferences + 4 * e, values)
        groups = argument(arguments, CHOOSE.num_groups)
        if groups > 1:
            of_group, top = num_experts // groups, argument(arguments, CHOOSE.top_groups)
            keep_best_groups(keys, preferences, preferences + 4 * padded, groups, of_group, top, correction != 0)
        # the choice
        chosen, experts = (
            argument(arguments, CHOOSE.chosen),
            argument(arguments, CHOOSE.experts) + token * num_chosen * 8,
        )
        for rank in range(num_chosen):
            if chosen != 0:
                store_i64(experts + 8 * rank, load_i64(chosen + (token * num_chosen + rank) * 8))
            else:
                best = _first_largest(keys, padded)
                store_i64(experts + 8 * rank, best)
                store_i32(keys + 4 * best, _NEVER)
        # weights
        weights = argument(arguments, CHOOSE.weights) + token * num_chosen * 4
        expert_scale = argument(arguments, CHOOSE.expert_scale)
        factor = 1.0 * float_argument(arguments, CHOOSE.scale)  # in float64
        if argument(arguments, CHOOSE.normalise) != 0:
            found = 0.0
            for rank in range(num_chosen):
                found += load_scalar_f32(scores + 4 * load_i64(experts + 8 * rank))
            factor /= found + float_argument(arguments, CHOOSE.tiny)
        for rank in range(num_chosen):
            expert = load_i64(experts + 8 * rank)
            weight = factor * load_scalar_f32(scores + 4 * expert)
            if expert_scale != 0:
                weight *= load_scalar_f32(expert_scale + 4 * expert)
            store_scalar_f32(weights + 4 * rank, weight)

    return choose_experts


def _make_groups() -> Any:
    """Build the helper that sets the keys of experts outside the best groups to `_NEVER`.

    A group is as good as its best expert's preference; with `pairs`, as the sum of its two best ones'.
    """

    @helper
    def keep_best_groups(keys, preferences, merits, groups, of_group, top, pairs):
        for group in range(groups):
            best, second = group * of_group, -1
            for e in range(best + 1, best + of_group):
                if load_i32(keys + 4 * e) > load_i32(keys + 4 * best):
                    best, second = e, best
                elif second < 0 or load_i32(keys + 4 * e) > load_i32(keys + 4 * second):
                    second = e
            merit = 1.0 * load_scalar_f32(preferences + 4 * best)
            if pairs and second >= 0:
                merit += load_scalar_f32(preferences + 4 * second)
            store_scalar_f32(merits + 4 * group, merit)
        for group in range(0, groups, LANES):
            count = min(LANES, groups - group)
            store_words(merits + 4 * group, _keys(load_part_f32(merits + 4 * group, count), count))
        for _ in range(top):
            best = _first_largest(merits, (groups + LANES - 1) // LANES * LANES)
            store_i32(merits + 4 * best, _NEVER)  # it is taken
        for group in range(groups):
            if load_i32(merits + 4 * group) != _NEVER:
                for e in range(group * of_group, (group + 1) * of_group):
                    store_i32(keys + 4 * e, _NEVER)

    return keep_best_groups


def _make_scores(score: str) -> Any:
    """Build write_scores(scores, E, peak): it replaces a token's logits by scores; `peak` is the largest logit, in every lane."""
    is_softmax, is_sigmoid = score == "softmax", score == "sigmoid"

    @helper
    def write_scores(scores, num_experts, peak):
        total = splat(0.0)
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

    return write_scores


@emits(INTS, FLOATS, INT)
def _keys(b, preferences, count):
    """Return integers that order experts by preference: NaN is above all, -0 equals 0. Lanes from `count` on are `_NEVER`."""
    zero = constant(F32_16, 0.0)
    bits = b.bitcast(b.fadd(preferences, zero), I32_16)
    flipped = b.xor(bits, b.and_(b.ashr(bits, constant(I32_16, 31)), constant(I32_16, _LARGEST)))
    ordered = b.select(b.fcmp_unordered("uno", preferences, zero), constant(I32_16, _LARGEST), flipped)
    return b.select(lane_mask(b, count), ordered, constant(I32_16, _NEVER))


@emits(INT, INT, INT)
def _first_largest(b, keys, count):
    """Return the index of the largest of `count` keys, the first of equal ones; `count` is a multiple of 16."""
    lanes = ir.Constant(I32_16, list(range(LANES)))

    def body(k: ir.Value, best: list[ir.Value]) -> list[ir.Value]:
        values = load(b, b.add(keys, b.mul(k, int64(4))), I32_16, 4)
        larger = b.icmp_signed(">", values, best[0])
        index = b.add(lanes, broadcast(b, b.trunc(k, I32), I32_16))
        return [b.select(larger, values, best[0]), b.select(larger, index, best[1])]

    values, index = Loop(b, count, LANES, [constant(I32_16, _NEVER), lanes], body).results
    largest = b.call(function(b, f"llvm.vector.reduce.smax.v{LANES}i32", I32, [I32_16]), [values])
    is_best = b.icmp_signed("==", values, broadcast(b, largest, I32_16))
    index = b.select(is_best, index, constant(I32_16, _LARGEST))
    first = b.call(function(b, f"llvm.vector.reduce.smin.v{LANES}i32", I32, [I32_16]), [index])
    return b.sext(first, I64)

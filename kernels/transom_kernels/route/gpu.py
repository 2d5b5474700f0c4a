"""The MoE router on GPUs: the kernels `score_experts` (partial logits) and `choose_experts` (top-k, weights), and their launches.

    logits = x @ weight^T + bias,  scores = softmax, sigmoid or sqrt(softplus) of the logits
    chosen = the K largest of logits (or scores + correction),  weights = scores[chosen], normalised, * scale * expert_scale

The product is in full float32, without tensor cores. It is cut along N into *splits* of equal length (split-K), so that many
programs run at once. A partial logit is one chain of multiply-adds along its split, the same in every tile, and partial logits are
always added in the same order: no sum depends on the number of tokens.

Legend: T tokens, N hidden width, E experts, K experts per token, S splits of N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from transom_kernels.launch import next_power_of_two
from transom_kernels.prepared_launch import PreparedLaunch, kept
from transom_kernels.route.reference import TINY, Routing
from transom_kernels.triton_math import softplus

MIN_SPLIT = 128  # least elements of N in a split
# most partial logits of a token (16 KiB). They make 4096 / 32 = 128 programs, about one for each multiprocessor of an H200
MAX_PARTIALS = 4096
FEW_TOKENS = 256  # with up to this many tokens (a decoding batch) tiles are small
MIN_EXPERTS = 16  # least experts of a tile

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}  # `reference.Score` -> one of these constants

_NEVER = tl.constexpr(-(2**62))  # the key of experts that do not exist or are chosen already; below all others


def route_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    launches: dict[Any, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts [T, K] int64 and weights [T, K] float32 of `x` [T, N], by the router matrix `weight` [E, N] float32.

    The module docstring has the formula. `correction` is used for the choice only; `chosen` fixes the choice. `launches` keep what
    is the same at each call of a layer.
    """
    tokens, num_chosen = x.shape[0], routing.num_chosen
    experts = x.new_empty(tokens, num_chosen, dtype=torch.int64)
    weights = x.new_empty(tokens, num_chosen, dtype=torch.float32)
    if not tokens:
        return experts, weights
    partials = partial_logits_triton(x if x.stride(1) == 1 else x.contiguous(), weight, launches)
    vectors, is_fixed = (bias, correction, expert_scale), chosen is not None
    launch, read = kept(launches, is_fixed, _of_layer, partials.shape[1], weight, routing, vectors, is_fixed)
    given = experts if chosen is None else chosen.contiguous()
    launch((tokens, 1, 1), (partials, *read, given, experts, weights))
    return experts, weights


def partial_logits_triton(
    x: torch.Tensor, weight: torch.Tensor, launches: dict[Any, Any] | None = None
) -> torch.Tensor:
    """Return partial logits [T, S, E] float32, each over one split of N; their sum over S is the logits without bias."""
    tokens, num_experts, key = x.shape[0], weight.shape[0], (x.stride(0), x.shape[0] <= FEW_TOKENS)
    launch, tile, num_splits = kept(launches, key, _product, *key, x.shape[1], num_experts, weight.stride())
    partials = x.new_empty(tokens, num_splits, num_experts, dtype=torch.float32)
    programs = (-(-tokens // tile.block_t), -(-num_experts // tile.block_e), num_splits)
    launch(programs, (x, weight, partials), tokens)
    return partials


def _of_layer(
    num_splits: int, weight: torch.Tensor, routing: Routing, vectors: Sequence[torch.Tensor | None], is_fixed: bool
) -> tuple[PreparedLaunch, list[torch.Tensor]]:
    """Prepare the launch of `choose_experts`, and its vectors: the weight stands in for those that it does not read."""
    has = (*[vector is not None for vector in vectors], is_fixed)
    read = [weight if vector is None else vector.contiguous() for vector in vectors]
    return _choice(num_splits, weight.shape[0], routing, *has), read


def _product(
    x_stride: int, is_small: bool, width: int, num_experts: int, weight_strides: tuple[int, int]
) -> tuple[PreparedLaunch, Tile, int]:
    """Prepare the launch of `score_experts`; return its tile and the number of splits, too."""
    split, tile = split_of(width, num_experts), _tile(is_small, num_experts)
    strides = {"x_stride": x_stride, "weight_stride_e": weight_strides[0], "weight_stride_n": weight_strides[1]}
    blocks = {"BLOCK_T": tile.block_t, "BLOCK_E": tile.block_e, "BLOCK_N": tile.block_n}
    arguments = {**strides, "E": num_experts, "N": width, "SPLIT": split, **blocks}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return PreparedLaunch(score_experts, arguments, **options), tile, -(-width // split)


@cache
def _choice(
    num_splits: int,
    num_experts: int,
    routing: Routing,
    has_bias: bool,
    has_correction: bool,
    has_scale: bool,
    is_fixed: bool,
) -> PreparedLaunch:
    """Prepare the launch of `choose_experts`."""
    block_s, block_e, num_warps = read_blocks(num_splits, num_experts)
    arguments = {
        "scale": routing.scale,
        "tiny": TINY,
        "E": num_experts,
        "K": routing.num_chosen,
        "GROUPS": routing.num_groups,
        "TOP_GROUPS": routing.top_groups,
        "SPLITS": num_splits,
        "SCORE": SCORES[routing.score],
        "NORMALISE": routing.normalise,
        "HAS_BIAS": has_bias,
        "HAS_CORRECTION": has_correction,
        "HAS_SCALE": has_scale,
        "IS_FIXED": is_fixed,
        "BLOCK_E": block_e,
        "BLOCK_G": next_power_of_two(routing.num_groups),
        "BLOCK_K": next_power_of_two(routing.num_chosen),
        "BLOCK_S": block_s,
    }
    return PreparedLaunch(choose_experts, arguments, num_warps=num_warps)


# --- sizes of tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile of the router's product: tokens, experts, elements of N per iteration; warps and pipeline stages."""

    block_t: int
    block_e: int
    block_n: int
    num_warps: int
    num_stages: int = 3


def _tile(is_small: bool, num_experts: int) -> Tile:
    """Return the tile of the product for a batch. All tiles add products in the same order."""
    experts = max(MIN_EXPERTS, next_power_of_two(num_experts))
    if is_small:
        return Tile(block_t=16, block_e=min(32, experts), block_n=32, num_warps=2)
    if experts <= 32:
        return Tile(block_t=64, block_e=experts, block_n=16, num_warps=4)
    return Tile(block_t=64, block_e=64, block_n=32, num_warps=8)  # with 4, a float32 tile spills registers on sm_100


def split_of(width: int, num_experts: int) -> int:
    """Return the elements of N per split. They do not depend on the number of tokens, so each batch adds in the same order."""
    most, split = max(1, MAX_PARTIALS // next_power_of_two(num_experts)), MIN_SPLIT
    while -(-width // split) > most:
        split *= 2
    return split


def read_blocks(num_splits: int, num_experts: int) -> tuple[int, int, int]:
    """Return the splits and the experts (padded) that a program of `choose_experts` reads, and its warps."""
    block_s, block_e = next_power_of_two(num_splits), max(MIN_EXPERTS, next_power_of_two(num_experts))
    return block_s, block_e, min(8, max(1, block_s * block_e // 1024))


# --- kernels


@triton.jit(do_not_specialize=["num_tokens"])
def score_experts(
    x,  # [T, N]
    weight,  # [E, N] float32
    partials,  # [T, S, E] float32
    num_tokens,
    x_stride,  # elements from token to token
    weight_stride_e,
    weight_stride_n,
    E: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,  # elements of N
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the partial logits of a tile of tokens and experts over `SPLIT` elements of N. The grid is (T tiles, E tiles, S)."""
    SPLITS: tl.constexpr = (N + SPLIT - 1) // SPLIT
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = x + t.to(tl.int64)[:, None] * x_stride
    columns = weight + e[None, :] * weight_stride_e
    partial = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for step in range(SPLIT // BLOCK_N):
        n = tl.program_id(2) * SPLIT + step * BLOCK_N + tl.arange(0, BLOCK_N)
        a = tl.load(rows + n[None, :], mask=(t < num_tokens)[:, None] & (n < N)[None, :], other=0.0)
        places = columns + n[:, None] * weight_stride_n
        b = tl.load(places, mask=(n < N)[:, None] & (e < E)[None, :], other=0.0)
        partial = tl.dot(a.to(tl.float32), b, partial, input_precision="ieee")
    places = partials + (t.to(tl.int64) * SPLITS + tl.program_id(2))[:, None] * E + e[None, :]
    tl.store(places, partial, mask=(t < num_tokens)[:, None] & (e < E)[None, :])


@triton.jit
def _scores(logits, is_expert, SCORE: tl.constexpr):
    """Return the scores [BLOCK_E] of logits."""
    if SCORE == SOFTMAX:
        weights = tl.exp(logits - tl.max(tl.where(is_expert, logits, float("-inf")), 0))
        return weights / tl.sum(tl.where(is_expert, weights, 0.0), 0)
    if SCORE == SIGMOID:
        return tl.sigmoid(logits)
    return tl.sqrt(softplus(logits))


@triton.jit
def _keys(preference, e):
    """Return integers that order experts: the largest key is of NaN, else of the largest preference; of equal ones, of the first.

    A key is (sortable bits of the float << 16) + 65535 - expert, so the expert can be read from the key.
    """
    bits = (preference + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    ordered = tl.where(preference == preference, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 16) | (65535 - e)


@triton.jit
def _of_best_groups(
    keys,
    preference,
    e,
    SIZE: tl.constexpr,  # experts of a group
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST: tl.constexpr,  # a group is as good as the sum of this many of its largest preferences
    BLOCK_G: tl.constexpr,
):
    """Return the keys with those of experts outside the best groups set to `_NEVER`."""
    g = tl.arange(0, BLOCK_G)
    merits = tl.zeros([BLOCK_G], tl.float32)
    for group in range(GROUPS):
        rest = tl.where(e // SIZE == group, keys, _NEVER)
        merit = 0.0
        for _ in tl.static_range(BEST):
            expert = 65535 - (tl.max(rest, 0) & 65535)
            merit += tl.sum(tl.where(e == expert, preference, 0.0), 0)
            rest = tl.where(e == expert, _NEVER, rest)
        merits = tl.where(g == group, merit, merits)
    order = tl.where(g < GROUPS, _keys(merits, g), _NEVER)
    is_best = e < 0
    for _ in range(TOP_GROUPS):
        best = 65535 - (tl.max(order, 0) & 65535)
        is_best |= e // SIZE == best
        order = tl.where(g == best, _NEVER, order)
    return tl.where(is_best, keys, _NEVER)


@triton.jit
def choose_experts(
    partials,  # [T, S, E] float32
    bias,  # [E] float32, or unused
    correction,  # [E] float32, or unused
    expert_scale,  # [E] float32, or unused
    chosen,  # [T, K] int64, or unused
    experts,  # [T, K] int64
    weights,  # [T, K] float32
    scale,  # multiplies all weights
    tiny,  # `reference.TINY`
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_FIXED: tl.constexpr,  # `chosen` gives the experts
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Choose the experts of one token: add partial logits, compute scores, take the K largest keys. The grid is (T)."""
    token = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    is_expert = e < E

    # logits and scores
    s = tl.arange(0, BLOCK_S)
    places = partials + (token * SPLITS + s)[:, None] * E + e[None, :]
    logits = tl.sum(tl.load(places, mask=(s < SPLITS)[:, None] & is_expert[None, :], other=0.0), 0)
    if HAS_BIAS:
        logits += tl.load(bias + e, mask=is_expert, other=0.0)
    scores = _scores(logits, is_expert, SCORE)

    # the choice: `ids` and their scores `found`, best first
    ids = tl.zeros([BLOCK_K], tl.int64)
    found = tl.zeros([BLOCK_K], tl.float32)
    if IS_FIXED:
        ids = tl.load(chosen + token * K + k, mask=k < K, other=0)
        for rank in range(K):
            expert = tl.load(chosen + token * K + rank)
            found = tl.where(k == rank, tl.sum(tl.where(e == expert, scores, 0.0), 0), found)
    else:
        preference = logits
        if HAS_CORRECTION:
            preference = scores + tl.load(correction + e, mask=is_expert, other=0.0)
        keys = tl.where(is_expert, _keys(preference, e), _NEVER)
        if GROUPS > 1:
            keys = _of_best_groups(keys, preference, e, E // GROUPS, GROUPS, TOP_GROUPS, 1 + HAS_CORRECTION, BLOCK_G)
        for rank in range(K):
            expert = 65535 - (tl.max(keys, 0) & 65535)
            found = tl.where(k == rank, tl.sum(tl.where(e == expert, scores, 0.0), 0), found)
            ids = tl.where(k == rank, expert, ids)
            keys = tl.where(e == expert, _NEVER, keys)

    # weights
    if NORMALISE:
        found = found / (tl.sum(found, 0) + tiny)
    found *= scale
    if HAS_SCALE:
        found *= tl.load(expert_scale + ids, mask=k < K, other=0.0)
    tl.store(experts + token * K + k, ids, mask=k < K)
    tl.store(weights + token * K + k, found, mask=k < K)

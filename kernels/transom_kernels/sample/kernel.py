"""Sampling in Triton: one program a row, however many filters.

The least logit that stays is searched in the order of floats as integers, sixteen thresholds a round, which settles four bits:
eight rounds over a row that lies in the cache find the exact value, by count (top-k) or by weight (top-p).

Legend: V vocabulary, N ids a round.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _order(x):
    """float32 as int64 that sorts alike, from 0."""
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits) + 0x80000000


@triton.jit
def _random_bits(key, counter):
    """SplitMix64's finaliser over wrapping 64-bit integers, as unsigned."""
    value = (key + counter * -7046029254386353131).to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _uniform(bits):
    """Inside (0, 1), an odd multiple of 2 ** -53."""
    return ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _gumbel(key, token):
    """Noise of each token id, float64."""
    bits = _random_bits(key, -1 - token // 64)
    exponential = -tl.log(_uniform(bits)) / 64
    is_least = (bits & 63).to(tl.int64) == token % 64
    return -tl.log(exponential + tl.where(is_least, 0.0, -tl.log(_uniform(_random_bits(key, token)))))


@triton.jit
def _cut(row, num_ids, temperature, best, least, wanted, BY_WEIGHT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The largest threshold at which those that reach it and `least` number, or weigh, `wanted`: in the order of floats."""
    found = tl.full([], 0, tl.int64)
    digit = tl.arange(0, 16).to(tl.int64)
    for round in range(8):  # not unrolled, which would take half a minute to compile
        step = 1 << (28 - 4 * round)
        reached = tl.zeros([16], tl.float64)
        for first in range(0, num_ids, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            value = tl.load(row + n, mask=n < num_ids, other=float("-inf")) / temperature
            order = _order(value)
            amount = tl.where((n < num_ids) & (order >= least), 1.0, 0.0)
            if BY_WEIGHT:
                amount *= tl.exp(value - best)
            passes = order[:, None] >= (found + digit * step)[None, :]
            reached += tl.sum(tl.where(passes, amount[:, None], 0.0), 0).to(tl.float64)
        found += (tl.sum((reached >= wanted).to(tl.int32), 0) - 1).to(tl.int64) * step
    return found


@triton.jit
def sample_rows(
    logits,  # [S, V] float32
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    keys,  # [S] int64
    out,  # [S] int64
    num_ids,
    stride,
    BLOCK_N: tl.constexpr,
    BLOCK_SEARCH: tl.constexpr,
):
    """One row."""
    s = tl.program_id(0)
    row = logits + s.to(tl.int64) * stride
    temperature, key = tl.load(temperatures + s), tl.load(keys + s)
    top_k, top_p, min_p = tl.load(top_ks + s), tl.load(top_ps + s), tl.load(min_ps + s)
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    least = tl.full([], 0, tl.int64)
    limits_k, limits_p = (top_k > 0) & (top_k < num_ids), top_p < 1.0
    if (not greedy) & (limits_k | limits_p | (min_p > 0.0)):
        most = tl.full([BLOCK_N], float("-inf"), tl.float32)
        for first in range(0, num_ids, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            most = tl.maximum(most, tl.load(row + n, mask=n < num_ids, other=float("-inf")))
        best = tl.max(most, 0) / temperature
        if limits_k:
            least = _cut(row, num_ids, temperature, best, least, top_k.to(tl.float64), False, BLOCK_SEARCH)
        if limits_p:
            weight = tl.zeros([], tl.float64)
            for first in range(0, num_ids, BLOCK_N):
                n = first + tl.arange(0, BLOCK_N)
                value = tl.load(row + n, mask=n < num_ids, other=float("-inf")) / temperature
                weight += tl.sum(tl.where(_order(value) >= least, tl.exp(value - best), 0.0).to(tl.float64), 0)
            least = tl.maximum(
                least, _cut(row, num_ids, temperature, best, least, top_p.to(tl.float64) * weight, True, BLOCK_SEARCH)
            )
        if min_p > 0.0:
            least = tl.maximum(least, _order(best + tl.log(min_p)))
    top_score = tl.full([], float("-inf"), tl.float64)
    top_id = tl.full([], 0, tl.int64)
    for first in range(0, num_ids, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N).to(tl.int64)
        value = tl.load(row + n, mask=n < num_ids, other=float("-inf")) / temperature
        stays = (n < num_ids) & (_order(value) >= least)
        score = value.to(tl.float64)
        if not greedy:
            score += _gumbel(key, n)
        score = tl.where(stays, score, float("-inf"))
        here = tl.max(score, 0)
        if here > top_score:  # a later id of the same score does not count
            top_score = here
            top_id = first + tl.argmax(score, 0).to(tl.int64)
    tl.store(out + s, top_id)


@triton.jit(do_not_specialize=["num_changes"])
def change_logits(logits, rows, ids, factors, minus, stride, num_changes, BLOCK_C: tl.constexpr):
    """Repetition factors and what is subtracted, each pair of row and id once."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < num_changes
    place = logits + tl.load(rows + c, mask=inside, other=0) * stride + tl.load(ids + c, mask=inside, other=0)
    value = tl.load(place, mask=inside, other=0.0)
    factor = tl.load(factors + c, mask=inside, other=1.0)
    value = tl.where(value > 0, value / factor, value * factor) - tl.load(minus + c, mask=inside, other=0.0)
    tl.store(place, value, mask=inside)

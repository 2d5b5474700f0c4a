"""Sampling in Triton: `block_maxima` has read all logits; `sample_rows` samples each row from its results and a few blocks.

Top-k: k blocks have a maximum that reaches the k-th largest of them, so what stays is among the ids that reach it; these few are
compared with each other. Top-p alone is not searched: the winner of all ids stays if the ids above it weigh less than p, and
is then the winner of those that stay; else it is out and all below it, and the next winner is looked at.

Legend: S rows, V vocabulary, B blocks of 64 ids, C chunks of a row, L places for ids, N ids that are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.sample.gumbel_max import block_ids, kth_largest, list_blocks, mass_from, race, winner
from transom_kernels.sample.gumbel_noise import LOWEST, NOISE_BLOCK, gumbel, load_tempered, order, pack

OTHERS = tl.constexpr(8)  # against which ids are compared at once
DRAWN = tl.constexpr(256)  # ids that draw noise at once


@triton.jit
def sample_rows(
    logits,  # [S, V] float32
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    keys,  # [S] int64
    maxima,  # [S, B] float32; these four are `block_maxima`'s
    lucky,  # [S, B]
    noise,  # [S, B]
    weights,  # [S, C, 2]
    lists,  # [S, B + L] int32, for a program's own use
    out,  # [S] int64
    num_ids,
    stride,
    num_blocks,
    num_chunks,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_L: tl.constexpr,
    ROUND: tl.constexpr,
    KEPT: tl.constexpr,
):
    """One row."""
    s = tl.program_id(0).to(tl.int64)
    row, maxima = logits + s * stride, maxima + s * num_blocks
    lucky, noise, blocks = lucky + s * num_blocks, noise + s * num_blocks, lists + s * (num_blocks + BLOCK_L)
    ids = blocks + num_blocks
    temperature, key = tl.load(temperatures + s), tl.load(keys + s)
    top_k, top_p, min_p = tl.load(top_ks + s), tl.load(top_ps + s), tl.load(min_ps + s)
    most, block = _highest_block(maxima, num_blocks, BLOCK_B)
    if temperature == 0.0:
        n = block * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)
        _, token = winner(tl.load(row + n, mask=n < num_ids, other=float("-inf")), n)
        tl.store(out + s, token.to(tl.int64))
        return
    best = tl.div_rn(most, temperature)
    cut = tl.full([], LOWEST, tl.int32)  # what stays are ids from there on, in the order of floats
    if min_p > 0.0:
        cut = _first_from(best.to(tl.float64) + tl.log(min_p.to(tl.float64)))
    token = tl.full([], -1, tl.int32)
    wanted = tl.full([], float("inf"), tl.float64)  # weight of what stays
    if (top_k > 0) & (top_k < num_ids):
        floor = kth_largest(maxima, ids, num_blocks, top_k, temperature, False, 4)
        count = _list_ids(row, maxima, blocks, ids, temperature, floor, num_ids, num_blocks, BLOCK_B, ROUND, BLOCK_L)
        if count <= KEPT:
            token = _choose_among(row, ids, count, key, temperature, best, cut, top_k, top_p, KEPT)
        else:
            kth = _kth_of_many(row, ids, count, top_k, temperature, num_ids, BLOCK_L - ROUND * NOISE_BLOCK)
            if top_p < 1.0:
                wanted = top_p.to(tl.float64) * mass_from(
                    row, maxima, blocks, temperature, best, kth, num_ids, num_blocks, BLOCK_B, ROUND
                )
            cut = tl.maximum(cut, kth)
    elif top_p < 1.0:
        wanted = top_p.to(tl.float64) * _total(weights + s * num_chunks * 2, best, num_chunks, BLOCK_C)
    if token < 0:
        token = _winner_inside(
            row, maxima, lucky, noise, blocks, ids, key, temperature, best, cut, wanted, num_ids, num_blocks,
            BLOCK_B, ROUND, BLOCK_L,
        )  # fmt: skip
    tl.store(out + s, token.to(tl.int64))


@triton.jit
def _winner_inside(
    row, maxima, lucky, noise, blocks, ids, key, temperature, best, cut, wanted, num_ids, num_blocks,
    BLOCK_B: tl.constexpr, ROUND: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """The id that wins among those from `cut` on that stay: the ids above it weigh less than `wanted`, or it is the best."""
    token = tl.full([], -1, tl.int32)
    while token < 0:
        token = race(
            row, maxima, lucky, noise, blocks, ids, key, temperature, cut, num_ids, num_blocks,
            BLOCK_B, ROUND, BLOCK_L, DRAWN,
        )  # fmt: skip
        if wanted < float("inf"):
            value = tl.div_rn(tl.load(row + token), temperature)
            cut = order(value) + 1
            above = mass_from(row, maxima, blocks, temperature, best, cut, num_ids, num_blocks, BLOCK_B, ROUND)
            if (above >= wanted) & (value < best):
                token = tl.full([], -1, tl.int32)
    return token


@triton.jit
def _kth_of_many(row, ids, count, k, temperature, num_ids, LONGEST: tl.constexpr):
    """The order of a row's k-th largest value: among `count` listed ids, or where the list may have been cut short among all."""
    if count <= LONGEST:
        found = kth_largest(row, ids, count, k, temperature, True, 8)
    else:
        found = kth_largest(row, ids, num_ids, k, temperature, False, 8)
    return found


@triton.jit
def _highest_block(maxima, num_blocks, BLOCK_B: tl.constexpr):
    """The largest logit of a row and the first block that has it."""
    most, block = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        value, found = winner(tl.load(maxima + b, mask=b < num_blocks, other=float("-inf")), b)
        if value > most:
            most = value
            block = found
    return most, block


@triton.jit
def _first_from(bound):
    """The order of the first float32 from `bound` on, which is a float64."""
    rounded = bound.to(tl.float32)
    return order(rounded) + (rounded.to(tl.float64) < bound).to(tl.int32)


@triton.jit
def _total(weights, best, num_chunks, BLOCK_C: tl.constexpr):
    """The weights of a whole row; the best id weighs 1."""
    total = tl.zeros([], tl.float64)
    for first in range(0, num_chunks, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        largest = tl.load(weights + c * 2, mask=c < num_chunks, other=float("-inf"))
        weight = tl.load(weights + c * 2 + 1, mask=c < num_chunks, other=0.0)
        total += tl.sum((weight * tl.exp(largest - best)).to(tl.float64), 0)
    return total


@triton.jit
def _list_ids(
    row, maxima, blocks, ids, temperature, floor, num_ids, num_blocks,
    BLOCK_B: tl.constexpr, ROUND: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Lists the ids from `floor` on, in the order of floats; how many there are, at least, where they are too many for the list."""
    num_listed = list_blocks(maxima, blocks, temperature, floor, num_blocks, BLOCK_B)
    count = tl.full([], 0, tl.int32)
    for first in range(0, num_listed, ROUND):
        if count <= BLOCK_L - ROUND * NOISE_BLOCK:
            _, n = block_ids(blocks, first, num_listed, num_blocks, ROUND)
            value = load_tempered(row, n, n < num_ids, temperature)
            stays = tl.reshape((order(value) >= floor) & (value > float("-inf")), [ROUND * NOISE_BLOCK])
            count += pack(stays, tl.reshape(n, [ROUND * NOISE_BLOCK]), ids + count)
    return count


@triton.jit
def _choose_among(row, ids, count, key, temperature, best, cut, top_k, top_p, KEPT: tl.constexpr):
    """All filters and the choice over `count` listed ids, which hold the top k: each is compared with every other."""
    i = tl.arange(0, KEPT)
    token = tl.load(ids + i, mask=i < count, other=0)
    value = load_tempered(row, token, i < count, temperature)
    num_above, above = tl.zeros([KEPT], tl.int32), tl.zeros([KEPT], tl.float64)
    for first in range(0, count, OTHERS):
        j = first + tl.arange(0, OTHERS)
        other = load_tempered(row, tl.load(ids + j, mask=j < count, other=0), j < count, temperature)
        is_above = other[None, :] > value[:, None]  # [N, 8]
        weight = tl.exp(other.to(tl.float64) - best)
        num_above += tl.sum(is_above.to(tl.int32), 1)
        above += tl.sum(tl.where(is_above, weight[None, :], 0.0), 1)
    stays = (i < count) & (num_above < top_k)
    if top_p < 1.0:
        total = tl.sum(tl.where(stays, tl.exp(value.to(tl.float64) - best), 0.0), 0)
        stays = stays & ((above < top_p.to(tl.float64) * total) | (num_above == 0))
    stays = stays & (order(value) >= cut)
    score = tl.where(stays, value.to(tl.float64) + gumbel(key, token), float("-inf"))
    _, found = winner(score, token)
    return found


@triton.jit(do_not_specialize=["num_changes"])
def apply_logit_changes(logits, rows, ids, factors, minus, stride, num_changes, BLOCK_C: tl.constexpr):
    """Repetition factors and what is subtracted, each pair of row and id once."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < num_changes
    place = logits + tl.load(rows + c, mask=inside, other=0) * stride + tl.load(ids + c, mask=inside, other=0)
    value = tl.load(place, mask=inside, other=0.0)
    factor = tl.load(factors + c, mask=inside, other=1.0)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor) - tl.load(minus + c, mask=inside, other=0.0)
    tl.store(place, value, mask=inside)

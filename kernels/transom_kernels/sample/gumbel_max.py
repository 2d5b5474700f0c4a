"""The winner of values plus noise among the ids of a row that stay, drawing only the noise that may matter.

Legend: B blocks of a row, T blocks of a round, L places for ids, N ids drawn at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.sample.gumbel_noise import LOWEST, NOISE_BLOCK, gumbel, load_tempered, order, pack

SLACK = tl.constexpr(4e-6)  # noise up to 41, rounded to float32; added to it, before a value's size can swallow it
SEARCHED = tl.constexpr(256)  # values that are held against 16 thresholds at once
NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def winner(score, token):
    """The best score and the lowest id that has it; id 0 where nothing scores."""
    best = tl.max(score, 0)
    found = tl.min(tl.where((score == best) & (score > float("-inf")), token, NO_ID), 0)
    return best, tl.where(found == NO_ID, 0, found)


@triton.jit
def block_ids(blocks, first, count, num_blocks, ROUND: tl.constexpr):
    """A round of listed blocks [T] and their ids [T, 64]; past the list, ids that no row has."""
    t = first + tl.arange(0, ROUND)
    block = tl.load(blocks + t, mask=t < count, other=num_blocks)
    return block, block[:, None] * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)[None, :]


@triton.jit
def list_blocks(maxima, blocks, temperature, cut, num_blocks, BLOCK_B: tl.constexpr):
    """Lists the blocks that have ids from `cut` on, in the order of floats; how many."""
    count = tl.full([], 0, tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        most = load_tempered(maxima, b, b < num_blocks, temperature)
        count += pack((order(most) >= cut) & (most > float("-inf")), b, blocks + count)
    return count


@triton.jit
def draw(row, ids, count, key, temperature, DRAWN: tl.constexpr):
    """The best score of `count` listed ids, which ascend, and its id."""
    top_score, top_id = tl.full([], float("-inf"), tl.float64), tl.full([], 0, tl.int32)
    for first in range(0, count, DRAWN):
        i = first + tl.arange(0, DRAWN)
        token = tl.load(ids + i, mask=i < count, other=0)
        value = load_tempered(row, token, i < count, temperature)
        score, found = winner(value.to(tl.float64) + gumbel(key, token), token)
        if score > top_score:
            top_score = score
            top_id = found
    return top_score, top_id


@triton.jit
def _hopeful_blocks(maxima, lucky, noise, blocks, temperature, cut, num_blocks, BLOCK_B: tl.constexpr):
    """Lists the blocks that may hold the winner; how many, and a score that the winner reaches."""
    reached = tl.full([], float("-inf"), tl.float64)
    for first in range(0, num_blocks, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        drawn = tl.load(noise + b, mask=b < num_blocks, other=0.0).to(tl.float64) - SLACK
        value = load_tempered(lucky, b, b < num_blocks, temperature)
        surely = tl.where(order(value) >= cut, value.to(tl.float64) + drawn, float("-inf"))
        reached = tl.maximum(reached, tl.max(surely, 0))
    count = tl.full([], 0, tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        drawn = tl.load(noise + b, mask=b < num_blocks, other=0.0).to(tl.float64) + SLACK
        most = load_tempered(maxima, b, b < num_blocks, temperature)
        may_win = (most.to(tl.float64) + drawn >= reached) & (order(most) >= cut) & (most > float("-inf"))
        count += pack(may_win, b, blocks + count)
    return count, reached


@triton.jit
def race(
    row, maxima, lucky, noise, blocks, ids, key, temperature, cut, num_ids, num_blocks,
    BLOCK_B: tl.constexpr, ROUND: tl.constexpr, BLOCK_L: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """The id that wins among those from `cut` on, in the order of floats."""
    num_hopeful, reached = _hopeful_blocks(maxima, lucky, noise, blocks, temperature, cut, num_blocks, BLOCK_B)
    top_score, top_id = tl.full([], float("-inf"), tl.float64), tl.full([], 0, tl.int32)
    num_listed = tl.full([], 0, tl.int32)
    for first in range(0, num_hopeful, ROUND):
        block, n = block_ids(blocks, first, num_hopeful, num_blocks, ROUND)
        value = load_tempered(row, n, n < num_ids, temperature)
        drawn = tl.load(noise + block, mask=block < num_blocks, other=0.0).to(tl.float64) + SLACK
        may_win = (value.to(tl.float64) + drawn[:, None] >= reached) & (order(value) >= cut) & (value > float("-inf"))
        flat = tl.reshape(may_win, [ROUND * NOISE_BLOCK])
        num_listed += pack(flat, tl.reshape(n, [ROUND * NOISE_BLOCK]), ids + num_listed)
        if (num_listed > BLOCK_L - ROUND * NOISE_BLOCK) | (first + ROUND >= num_hopeful):
            score, found = draw(row, ids, num_listed, key, temperature, DRAWN)
            if score > top_score:  # later ids are higher
                top_score = score
                top_id = found
            num_listed = tl.full([], 0, tl.int32)
    return top_id


@triton.jit
def mass_from(
    row, maxima, blocks, temperature, best, cut, num_ids, num_blocks, BLOCK_B: tl.constexpr, ROUND: tl.constexpr
):  # fmt: skip
    """The weights of a row's ids from `cut` on, in the order of floats; the best id weighs 1."""
    count = list_blocks(maxima, blocks, temperature, cut, num_blocks, BLOCK_B)
    total = tl.zeros([], tl.float64)
    for first in range(0, count, ROUND):
        _, n = block_ids(blocks, first, count, num_blocks, ROUND)
        value = load_tempered(row, n, n < num_ids, temperature)
        weight = tl.where(order(value) >= cut, tl.exp(value - best), 0.0)
        total += tl.sum(tl.sum(weight, 1).to(tl.float64), 0)
    return total


@triton.jit
def kth_largest(values, places, count, k, temperature, LISTED: tl.constexpr, ROUNDS: tl.constexpr):
    """The order of the k-th largest of `count` values, of its 32 bits the first 4 for each round, the others 0.

    They lie side by side, or if LISTED at `places`. Sixteen thresholds at a time, which settles four bits.
    """
    found = tl.full([], LOWEST, tl.int32)
    digit = tl.arange(0, 16)
    for round in range(ROUNDS):
        step = 1 << (28 - 4 * round)
        passed = tl.zeros([SEARCHED, 16], tl.int32)  # added up once: threads need not wait for each other in between
        for first in range(0, count, SEARCHED):
            i = first + tl.arange(0, SEARCHED)
            n = tl.load(places + i, mask=i < count, other=0) if LISTED else i
            value = order(load_tempered(values, n, i < count, temperature))
            passed += ((value[:, None] >= (found + digit * step)[None, :]) & (i < count)[:, None]).to(tl.int32)
        reached = tl.sum(passed, 0)
        found += tl.maximum(tl.sum((reached >= k).to(tl.int32), 0) - 1, 0) * step
    return found

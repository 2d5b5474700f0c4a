"""The Triton kernel `sample_rows`: picks one token for each row of logits.

It runs after `block_maxima` (`gpu.py`), which has read all logits and written a summary of each block of 64 ids. The grid is
(rows): one program samples one row. What it does depends on the row's parameters:

    temperature 0   take the id of the largest logit

    top-k           list the ids that reach the k-th largest block maximum. At least k ids do, one in each of k blocks, so the
                    top k are in the list. If it has up to KEPT ids: compare each with every other, apply all filters, and
                    sample. If it has more (many equal logits): find the k-th largest key, then go on as for other rows

    other rows      find the Gumbel-max winner of all ids at or above the cut. With top-p the winner is the sample if the ids above
                    it have less mass than p; if not, the winner and all ids below it are out: the cut rises above the winner,
                    and the next winner is found

This applies top-p exactly and without sorting: if top-p keeps the winner of all ids, that id also wins among the ids that top-p
keeps.

*Scaled* logits are divided by the temperature; a *cut key* is the sort key of the least scaled logit that is kept; the *mass* of an
id is exp(scaled logit - largest scaled logit). `gumbel_max.py` says more.

Legend: S rows, V vocabulary, B blocks of 64 ids, C chunks of a row, L places in the list of ids, N ids that are compared.
"""

import triton
import triton.language as tl

from transom_kernels.sample.gumbel_max import (
    LOWEST_KEY,
    NOISE_BLOCK,
    argmax_lowest_id,
    compact,
    gumbel,
    gumbel_argmax,
    ids_of_blocks,
    kth_largest_key,
    list_blocks_from,
    load_scaled,
    mass_from,
    sort_key,
)

COMPARED = tl.constexpr(8)  # ids that all candidates are compared with in one iteration
NOISE_WIDTH = tl.constexpr(256)  # ids whose noise is computed at once


@triton.jit
def sample_rows(
    logits,  # [S, V] float32
    temperatures,  # [S] float32
    top_ks,  # [S] int32
    top_ps,  # [S] float32
    min_ps,  # [S] float32
    keys,  # [S] int64
    maxima,  # [S, B] float32; this and the next three are outputs of `block_maxima`
    noisiest,  # [S, B]
    max_noise,  # [S, B]
    chunk_sums,  # [S, C, 2]
    lists,  # [S, B + L] int32: scratch of the row's program, a list of blocks and a list of ids
    out,  # [S] int64
    num_ids,  # V
    stride,  # elements from row to row of logits
    num_blocks,
    num_chunks,
    BLOCK_B: tl.constexpr,  # block summaries that are read at once
    BLOCK_C: tl.constexpr,  # chunk sums that are read at once
    BLOCK_L: tl.constexpr,  # L
    ROUND: tl.constexpr,  # blocks whose ids are read at once
    KEPT: tl.constexpr,  # ids that are compared with each other
):
    """Sample one row."""
    s = tl.program_id(0).to(tl.int64)
    row, maxima = logits + s * stride, maxima + s * num_blocks
    noisiest, max_noise, blocks = (
        noisiest + s * num_blocks,
        max_noise + s * num_blocks,
        lists + s * (num_blocks + BLOCK_L),
    )
    ids = blocks + num_blocks
    temperature, key = tl.load(temperatures + s), tl.load(keys + s)
    top_k, top_p, min_p = tl.load(top_ks + s), tl.load(top_ps + s), tl.load(min_ps + s)
    max_logit, block = _block_of_max(maxima, num_blocks, BLOCK_B)

    # greedy: the largest logit, in the first block that has it
    if temperature == 0.0:
        n = block * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)
        _, token = argmax_lowest_id(tl.load(row + n, mask=n < num_ids, other=float("-inf")), n)
        tl.store(out + s, token.to(tl.int64))
        return

    # min-p: a cut key relative to the most likely id
    max_scaled = tl.div_rn(max_logit, temperature)
    cut_key = tl.full([], LOWEST_KEY, tl.int32)  # ids with lower sort keys are out
    if min_p > 0.0:
        cut_key = _key_from(max_scaled.to(tl.float64) + tl.log(min_p.to(tl.float64)))

    # top-k, or top-p's share of all mass
    token = tl.full([], -1, tl.int32)  # -1: not sampled yet
    mass_limit = tl.full([], float("inf"), tl.float64)  # an id is out if the mass above it reaches this
    if (top_k > 0) & (top_k < num_ids):
        floor_key = kth_largest_key(maxima, ids, num_blocks, top_k, temperature, False, 4)
        count = _list_ids(
            row, maxima, blocks, ids, temperature, floor_key, num_ids, num_blocks, BLOCK_B, ROUND, BLOCK_L
        )
        if count <= KEPT:
            token = _sample_listed(row, ids, count, key, temperature, max_scaled, cut_key, top_k, top_p, KEPT)
        else:
            kth = _kth_key_of_row(row, ids, count, top_k, temperature, num_ids, BLOCK_L - ROUND * NOISE_BLOCK)
            if top_p < 1.0:
                mass_limit = top_p.to(tl.float64) * mass_from(
                    row, maxima, blocks, temperature, max_scaled, kth, num_ids, num_blocks, BLOCK_B, ROUND
                )
            cut_key = tl.maximum(cut_key, kth)
    elif top_p < 1.0:
        mass_limit = top_p.to(tl.float64) * _total_mass(
            chunk_sums + s * num_chunks * 2, max_scaled, num_chunks, BLOCK_C
        )

    # Gumbel-max among the ids that are left
    if token < 0:
        token = _sample_top_p(
            row, maxima, noisiest, max_noise, blocks, ids, key, temperature, max_scaled, cut_key, mass_limit, num_ids, num_blocks,
            BLOCK_B, ROUND, BLOCK_L,
        )  # fmt: skip
    tl.store(out + s, token.to(tl.int64))


@triton.jit
def _sample_top_p(
    row, maxima, noisiest, max_noise, blocks, ids, key, temperature, max_scaled, cut_key, mass_limit, num_ids, num_blocks,
    BLOCK_B: tl.constexpr, ROUND: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Return the Gumbel-max winner among ids with a sort key of `cut_key` or more and less mass above them than `mass_limit`.

    The most likely id is always one of them.
    """
    token = tl.full([], -1, tl.int32)
    while token < 0:
        token = gumbel_argmax(
            row, maxima, noisiest, max_noise, blocks, ids, key, temperature, cut_key, num_ids, num_blocks,
            BLOCK_B, ROUND, BLOCK_L, NOISE_WIDTH,
        )  # fmt: skip
        if mass_limit < float("inf"):
            value = tl.div_rn(tl.load(row + token), temperature)
            cut_key = sort_key(value) + 1
            mass_above = mass_from(
                row, maxima, blocks, temperature, max_scaled, cut_key, num_ids, num_blocks, BLOCK_B, ROUND
            )
            if (mass_above >= mass_limit) & (value < max_scaled):
                token = tl.full([], -1, tl.int32)
    return token


@triton.jit
def _kth_key_of_row(row, ids, count, k, temperature, num_ids, LONGEST: tl.constexpr):
    """Return the sort key of a row's k-th largest scaled logit.

    The search reads the `count` listed ids, or all ids if the list may be incomplete (longer than LONGEST).
    """
    if count <= LONGEST:
        found = kth_largest_key(row, ids, count, k, temperature, True, 8)
    else:
        found = kth_largest_key(row, ids, num_ids, k, temperature, False, 8)
    return found


@triton.jit
def _block_of_max(maxima, num_blocks, BLOCK_B: tl.constexpr):
    """Return the largest logit of a row and the first block that has it."""
    max_logit, block = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        value, found = argmax_lowest_id(tl.load(maxima + b, mask=b < num_blocks, other=float("-inf")), b)
        if value > max_logit:
            max_logit = value
            block = found
    return max_logit, block


@triton.jit
def _key_from(bound):
    """Return the sort key of the least float32 that is not below `bound`, a float64."""
    rounded = bound.to(tl.float32)
    return sort_key(rounded) + (rounded.to(tl.float64) < bound).to(tl.int32)


@triton.jit
def _total_mass(chunk_sums, max_scaled, num_chunks, BLOCK_C: tl.constexpr):
    """Return the mass of a whole row, from the sums of its chunks; the most likely id has mass 1."""
    total = tl.zeros([], tl.float64)
    for first in range(0, num_chunks, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        largest = tl.load(chunk_sums + c * 2, mask=c < num_chunks, other=float("-inf"))
        weight = tl.load(chunk_sums + c * 2 + 1, mask=c < num_chunks, other=0.0)
        total += tl.sum((weight * tl.exp(largest - max_scaled)).to(tl.float64), 0)
    return total


@triton.jit
def _list_ids(
    row, maxima, blocks, ids, temperature, floor_key, num_ids, num_blocks,
    BLOCK_B: tl.constexpr, ROUND: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """List the ids with a sort key of `floor_key` or more; return their number, or a lower bound of it if the list is full."""
    num_listed = list_blocks_from(maxima, blocks, temperature, floor_key, num_blocks, BLOCK_B)
    count = tl.full([], 0, tl.int32)
    for first in range(0, num_listed, ROUND):
        if count <= BLOCK_L - ROUND * NOISE_BLOCK:  # the list has room for all ids of this iteration
            _, n = ids_of_blocks(blocks, first, num_listed, num_blocks, ROUND)
            value = load_scaled(row, n, n < num_ids, temperature)
            is_kept = tl.reshape((sort_key(value) >= floor_key) & (value > float("-inf")), [ROUND * NOISE_BLOCK])
            count += compact(is_kept, tl.reshape(n, [ROUND * NOISE_BLOCK]), ids + count)
    return count


@triton.jit
def _sample_listed(row, ids, count, key, temperature, max_scaled, cut_key, top_k, top_p, KEPT: tl.constexpr):
    """Sample among `count` listed ids, which include the top k: compare each with every other, then apply all filters."""
    i = tl.arange(0, KEPT)
    token = tl.load(ids + i, mask=i < count, other=0)
    value = load_scaled(row, token, i < count, temperature)
    ids_above, mass_above = tl.zeros([KEPT], tl.int32), tl.zeros([KEPT], tl.float64)
    for first in range(0, count, COMPARED):
        j = first + tl.arange(0, COMPARED)
        other = load_scaled(row, tl.load(ids + j, mask=j < count, other=0), j < count, temperature)
        is_above = other[None, :] > value[:, None]  # [N, 8]
        weight = tl.exp(other.to(tl.float64) - max_scaled)
        ids_above += tl.sum(is_above.to(tl.int32), 1)
        mass_above += tl.sum(tl.where(is_above, weight[None, :], 0.0), 1)
    is_kept = (i < count) & (ids_above < top_k)
    if top_p < 1.0:
        total = tl.sum(tl.where(is_kept, tl.exp(value.to(tl.float64) - max_scaled), 0.0), 0)
        is_kept = is_kept & ((mass_above < top_p.to(tl.float64) * total) | (ids_above == 0))
    is_kept = is_kept & (sort_key(value) >= cut_key)
    score = tl.where(is_kept, value.to(tl.float64) + gumbel(key, token), float("-inf"))
    _, found = argmax_lowest_id(score, token)
    return found

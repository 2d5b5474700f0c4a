"""The Triton kernel `block_maxima`: one pass over all logits that leaves a summary of each block of 64 token ids.

Per block it writes the largest logit, the block's largest Gumbel noise, and the logit of the id that has that noise (the block's
*noisiest* id). The noise is built for this: a block's largest noise is one random number. So with those three numbers

    score of every id of the block  <=  largest logit / temperature + largest noise
    score of the noisiest id         =  its logit / temperature + largest noise

and `gumbel_max.py` skips every block whose bound lies below a score that is known. Few ids need their own noise.

For rows with top-p and without top-k it also writes the largest scaled logit and the softmax sum of each chunk of blocks.

The grid is (chunks of a row, rows): one program of one warp summarises one chunk.

Legend: S rows, V vocabulary, B blocks of a row, C chunks of a row, K blocks of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.sample.gumbel_noise import NOISE_BLOCK, least_exponential


@triton.jit
def block_maxima(
    logits,  # [S, V] float32
    temperatures,  # [S] float32; 0: greedy
    top_ks,  # [S] int32
    top_ps,  # [S] float32
    keys,  # [S] int64
    maxima,  # [S, B] float32: the largest logit of each block
    noisiest,  # [S, B] float32: the logit of the id with the largest noise; not written for greedy rows
    max_noise,  # [S, B] float32: that noise; not written for greedy rows
    chunk_sums,  # [S, C, 2] float32: largest scaled logit and sum of exp(scaled - largest); for rows with top-p alone
    num_ids,
    stride,  # elements from row to row of logits
    num_blocks,
    BLOCKS: tl.constexpr,  # K
):
    """Summarise one chunk of one row. A chunk's size is fixed, since a row's sums must not depend on the number of rows."""
    # load the chunk's logits
    c, s = tl.program_id(0), tl.program_id(1)
    row = logits + s.to(tl.int64) * stride
    b = c * BLOCKS + tl.arange(0, BLOCKS)
    inside = b < num_blocks
    at = s.to(tl.int64) * num_blocks + b
    n = b[:, None] * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)[None, :]  # [K, 64]
    value = tl.load(row + n, mask=n < num_ids, other=float("-inf"))

    # the largest logit of each block
    max_logit = tl.max(value, 1)
    tl.store(maxima + at, max_logit, mask=inside)
    temperature = tl.load(temperatures + s)
    if temperature != 0.0:
        # the largest noise of each block, and the logit of the id that has it
        exponential, place = least_exponential(tl.load(keys + s), b)
        token = b * NOISE_BLOCK + place
        tl.store(max_noise + at, (-tl.log(exponential)).to(tl.float32), mask=inside)
        tl.store(noisiest + at, tl.load(row + token, mask=token < num_ids, other=float("-inf")), mask=inside)

        # the chunk's softmax sum, which top-p alone needs
        top_k = tl.load(top_ks + s)
        if (tl.load(top_ps + s) < 1.0) & ((top_k <= 0) | (top_k >= num_ids)):
            value = tl.div_rn(value, tl.zeros_like(value) + temperature)
            largest = tl.max(tl.max(value, 1), 0)
            anchor = tl.where(largest == float("-inf"), 0.0, largest)
            place_of = chunk_sums + (s.to(tl.int64) * tl.num_programs(0) + c) * 2
            tl.store(place_of, largest)
            tl.store(place_of + 1, tl.sum(tl.sum(tl.exp(value - anchor), 1), 0))

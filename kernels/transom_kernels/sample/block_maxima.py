"""The one pass over all logits: what each block of 64 ids has at most, and the weights that top-p sums.

The noise was made for it: a block's least exponential variable is one draw, so that no id of the block can score more than the
block's largest value with that noise, and one id surely scores its value with that noise. Few ids need a draw of their own.

Legend: S rows, V vocabulary, B blocks of a row, C chunks of a row, K blocks of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transom_kernels.sample.gumbel_noise import NOISE_BLOCK, least_of_block


@triton.jit
def block_maxima(
    logits,  # [S, V] float32
    temperatures,
    top_ks,
    top_ps,
    keys,  # [S] int64
    maxima,  # [S, B] float32, of logits
    lucky,  # [S, B] float32, the logit of the id that has the least variable, so the most noise; nothing for greedy rows
    noise,  # [S, B] float32, of that id; nothing for greedy rows
    weights,  # [S, C, 2] float32, the largest value and the sum of exp(value - largest); for rows with top-p alone
    num_ids,
    stride,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    """One chunk of a row. Its size is fixed, since sums of weights must not depend on how many rows there are."""
    c, s = tl.program_id(0), tl.program_id(1)
    row = logits + s.to(tl.int64) * stride
    b = c * BLOCKS + tl.arange(0, BLOCKS)
    inside = b < num_blocks
    at = s.to(tl.int64) * num_blocks + b
    n = b[:, None] * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)[None, :]  # [K, 64]
    value = tl.load(row + n, mask=n < num_ids, other=float("-inf"))
    most = tl.max(value, 1)
    tl.store(maxima + at, most, mask=inside)
    temperature = tl.load(temperatures + s)
    if temperature != 0.0:
        exponential, place = least_of_block(tl.load(keys + s), b)
        token = b * NOISE_BLOCK + place
        tl.store(noise + at, (-tl.log(exponential)).to(tl.float32), mask=inside)
        tl.store(lucky + at, tl.load(row + token, mask=token < num_ids, other=float("-inf")), mask=inside)
        top_k = tl.load(top_ks + s)
        if (tl.load(top_ps + s) < 1.0) & ((top_k <= 0) | (top_k >= num_ids)):
            value = tl.div_rn(value, tl.zeros_like(value) + temperature)
            largest = tl.max(tl.max(value, 1), 0)
            anchor = tl.where(largest == float("-inf"), 0.0, largest)
            place_of = weights + (s.to(tl.int64) * tl.num_programs(0) + c) * 2
            tl.store(place_of, largest)
            tl.store(place_of + 1, tl.sum(tl.sum(tl.exp(value - anchor), 1), 0))

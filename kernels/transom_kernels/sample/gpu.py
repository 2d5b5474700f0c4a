"""Sampling on GPUs. `sample` launches `apply_logit_changes` if there are changes, then `block_maxima` and `sample_rows`;
`best_of_slice` launches `slice_scores`.

`block_maxima` reads all logits once and writes a summary of each block of 64 token ids: the largest logit, the block's
largest Gumbel noise, and the logit of the id that has that noise (the block's *noisiest* id). The noise is defined so that a
block's largest noise is one random number, which is cheap to compute (`reference.py`). With the three numbers

    score of every id of the block  <=  largest logit / temperature + largest noise
    score of the noisiest id         =  its logit / temperature + largest noise

and `gumbel_max.py` skips every block whose bound lies below a known score. Few ids need their own noise.

Legend: S rows, V vocabulary, B blocks of a row, C chunks of a row, K blocks of a chunk.
"""

import torch
import triton
import triton.language as tl

from transom_kernels.sample.gumbel_max import NO_ID, NOISE_BLOCK, gumbel, least_exponential, load_scaled
from transom_kernels.sample.reference import SampleParams
from transom_kernels.sample.sample_rows import sample_rows

# blocks of a `block_maxima` program, which is one warp: each thread computes the largest noise of one block
PROGRAM_BLOCKS = 32
ROUND_BLOCKS = 16  # blocks whose ids are read at once
READ_BLOCKS = 2048  # block summaries that are read at once
READ_CHUNKS = 256  # chunk sums that are read at once
LISTED_IDS = 4096  # places in a row's list of candidate ids; must be at least COMPARED_IDS plus the ids of ROUND_BLOCKS
COMPARED_IDS = 512  # up to this many ids of a top-k list are each compared with all others
CHANGES = 256  # logit changes that one program applies
SLICE_IDS = 1024  # ids of a slice that one `slice_scores` program scores
# Warps of a `sample_rows` program. With 8 warps Triton 3.7.1 needs more than 128 registers per thread on sm_90, and spills 8 bytes.
ROW_WARPS = 16


def sample_triton(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """Sample one token id for each row of `logits` [S, V] float32 by `params`; return [S] int64.

    The logit changes of `params` are applied to `logits` in place; then the filters and seeded Gumbel noise choose the id.
    """
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if params.change_row is not None and len(params.change_row):
        count = len(params.change_row)
        apply_logit_changes[(-(-count // CHANGES),)](
            logits, params.change_row, params.change_id, params.change_factor, params.change_minus, logits.stride(0), count,
            BLOCK_C=CHANGES,
        )  # fmt: skip
    if len(logits):
        _sample_rows(logits, params, out)
    return out


def best_of_slice_triton(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's best score [S] float64 and its id [S] int64; `logits` [S, V] are those of the ids from `first_id` on.

    A score is the logit, or logit / temperature plus Gumbel noise if `temperature` is above 0 (`op.best_of_slice`). The noise of
    every id is computed: a rank's slice is short, so that this float64 arithmetic does not hold up a step.
    """
    num_rows, num_ids = logits.shape
    shape = num_rows, -(-num_ids // SLICE_IDS)
    scores, found = (torch.empty(shape, dtype=dtype, device=logits.device) for dtype in (torch.float64, torch.int64))
    if num_rows:
        slice_scores[shape[::-1]](
            logits, temperature, keys, scores, found, first_id, num_ids, logits.stride(0), BLOCK_V=SLICE_IDS
        )
    best = scores.max(1, keepdim=True)
    return best.values[:, 0], found.gather(1, best.indices)[:, 0]


def _sample_rows(logits: torch.Tensor, params: SampleParams, out: torch.Tensor) -> None:
    num_rows, num_ids = logits.shape
    num_blocks = -(-num_ids // NOISE_BLOCK.value)
    num_chunks = -(-num_blocks // PROGRAM_BLOCKS)
    # separate tensors: slices of one tensor may not begin at multiples of 16 bytes, and then Triton would compile another kernel
    maxima, noisiest, max_noise = (logits.new_empty(num_rows, num_blocks) for _ in range(3))
    chunk_sums = logits.new_empty(num_rows, num_chunks, 2)
    lists = torch.empty(num_rows, num_blocks + LISTED_IDS, dtype=torch.int32, device=logits.device)
    block_maxima[(num_chunks, num_rows)](
        logits, params.temperature, params.top_k, params.top_p, params.keys, maxima, noisiest, max_noise, chunk_sums,
        num_ids, logits.stride(0), num_blocks,
        BLOCKS=PROGRAM_BLOCKS, num_warps=1,
    )  # fmt: skip
    sample_rows[(num_rows,)](
        logits, params.temperature, params.top_k, params.top_p, params.min_p, params.keys,
        maxima, noisiest, max_noise, chunk_sums, lists, out, num_ids, logits.stride(0), num_blocks, num_chunks,
        BLOCK_B=READ_BLOCKS, BLOCK_C=READ_CHUNKS, BLOCK_L=LISTED_IDS, ROUND=ROUND_BLOCKS,
        KEPT=COMPARED_IDS, num_warps=ROW_WARPS,
    )  # fmt: skip


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
    chunk_sums,  # [S, C, 2] float32: largest scaled logit and sum of exp(scaled - largest); if top-p is on and top-k off
    num_ids,
    stride,  # elements from row to row of logits
    num_blocks,
    BLOCKS: tl.constexpr,  # K
):
    """Summarise one chunk of one row. For rows with top-p and without top-k, also write the chunk's softmax sum.

    The grid is (chunks of a row, rows); one program is one warp. A chunk's size is fixed, since a row's sums must not depend on
    the number of rows.
    """
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

        # the chunk's softmax sum, which is needed if top-p is on and top-k off
        top_k = tl.load(top_ks + s)
        if (tl.load(top_ps + s) < 1.0) & ((top_k <= 0) | (top_k >= num_ids)):
            value = tl.div_rn(value, tl.zeros_like(value) + temperature)
            largest = tl.max(tl.max(value, 1), 0)
            anchor = tl.where(largest == float("-inf"), 0.0, largest)
            place_of = chunk_sums + (s.to(tl.int64) * tl.num_programs(0) + c) * 2
            tl.store(place_of, largest)
            tl.store(place_of + 1, tl.sum(tl.sum(tl.exp(value - anchor), 1), 0))


@triton.jit(do_not_specialize=["num_changes"])
def apply_logit_changes(logits, rows, ids, factors, subtrahends, stride, num_changes, BLOCK_C: tl.constexpr):
    """Apply `BLOCK_C` changes in place: a positive logit is divided by the factor, others are multiplied; then subtract.

    The grid is (chunks of changes). A pair of row and id occurs at most once.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < num_changes
    place = logits + tl.load(rows + c, mask=inside, other=0) * stride + tl.load(ids + c, mask=inside, other=0)
    value = tl.load(place, mask=inside, other=0.0)
    factor = tl.load(factors + c, mask=inside, other=1.0)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor) - tl.load(
        subtrahends + c, mask=inside, other=0.0
    )
    tl.store(place, value, mask=inside)


@triton.jit(do_not_specialize=["first_id"])
def slice_scores(
    logits,  # [S, V] float32
    temperatures,  # [S] float32; 0: greedy
    keys,  # [S] int64
    scores,  # [S, C] float64: the best score of each chunk
    found,  # [S, C] int64: its token id, the lowest of equal scores
    first_id,  # the token id of the first column
    num_ids,
    stride,  # elements from row to row of logits
    BLOCK_V: tl.constexpr,  # ids of a chunk
):
    """Compute the best score of one chunk of one row, and its id. The grid is (chunks of a row, rows)."""
    c, s = tl.program_id(0), tl.program_id(1)
    row = logits + s.to(tl.int64) * stride
    n = c * BLOCK_V + tl.arange(0, BLOCK_V)
    token = first_id + n
    temperature = tl.load(temperatures + s)
    if temperature == 0.0:
        score = tl.load(row + n, mask=n < num_ids, other=float("-inf")).to(tl.float64)
    else:
        score = load_scaled(row, n, n < num_ids, temperature).to(tl.float64) + gumbel(tl.load(keys + s), token)
    best = tl.max(score, 0)
    lowest = tl.min(tl.where((score == best) & (n < num_ids), token, NO_ID), 0)
    at = s * tl.num_programs(0) + c
    tl.store(scores + at, best)
    tl.store(found + at, tl.where(lowest == NO_ID, first_id, lowest).to(tl.int64))

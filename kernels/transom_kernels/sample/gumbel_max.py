"""Triton functions that the sampling kernels share: Gumbel noise, and the Gumbel-max sample of a row.

*Gumbel noise* of a token id is `-log(X)` of an exponential variable X. The largest `logit / temperature + noise` of a row is a
sample of its softmax (the Gumbel-max trick). Noise is a function of the row's key and the token id alone; `reference.py` defines
it. It is computed only for the ids that may win.

The sample is the id with the largest score = logit / temperature + Gumbel noise, among the ids that the filters keep. The kernel
`block_maxima` has written three numbers of each block of 64 ids: its largest logit, its largest noise, and the logit of the id that
has this noise (the noisiest id). They bound the block's scores from above and give one exact score. At temperature 1:

    block   largest logit   largest noise   bound   logit of noisiest id   its score
      0          7.0             2.0          9.0            1.0              3.0
      1          3.0             5.0          8.0            2.5              7.5      <- known: the winner scores at least 7.5
      2          1.0             4.0          5.0            0.0              4.0      <- bound below 7.5: skipped

A *scaled* logit is divided by the temperature. The *mass* of an id is exp(scaled logit - largest scaled logit), its
softmax weight before normalisation. A *sort key* is an int32 made of a float32 so that keys are ordered as the floats are;
comparisons and bitwise searches use it. The *cut key* is the sort key of the least scaled logit that the filters keep.

Legend: B blocks of a row, T blocks of an iteration, L places in a list of ids.
"""

import triton
import triton.language as tl

NOISE_BLOCK = tl.constexpr(64)  # token ids of a block; a block's largest noise is one random number
LOWEST_KEY = tl.constexpr(-(2**31))  # below the sort key of every float
SLACK = tl.constexpr(4e-6)  # above the rounding error of noise (at most 41) in float32; makes bounds safe
SEARCH_WIDTH = tl.constexpr(256)  # values that are compared with 16 thresholds in one iteration
NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def sort_key(x):
    """Return the sort key of a float32: int32 keys are ordered as the floats are; both zeros give 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def load_scaled(row, n, inside, temperature):
    """Load logits `row[n]` divided by the temperature, rounded as the reference rounds; -inf where not `inside`."""
    value = tl.load(row + n, mask=inside, other=float("-inf"))
    return tl.div_rn(value, tl.zeros_like(value) + temperature)


@triton.jit
def random_bits(key, counter):
    """Return 64 random bits, unsigned: SplitMix64's finaliser of `key + counter * GOLDEN` (`reference.py`), which wraps around."""
    value = (key + counter * -7046029254386353131).to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def uniform(bits):
    """Return (upper 52 of the random bits + 1 / 2) * 2 ** -52: a float64 inside (0, 1), an odd multiple of 2 ** -53."""
    return ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def least_exponential(key, block):
    """Return the least exponential variable of each block, float64, and the offset in the block of the id that has it.

    It gives the block's largest noise. The least of 64 variables is an exponential variable divided by 64.
    """
    bits = random_bits(key, -1 - block.to(tl.int64))
    return -tl.log(uniform(bits)) / 64, (bits & 63).to(tl.int32)


@triton.jit
def gumbel(key, token):
    """Return the Gumbel noise of each token id, float64."""
    exponential, place = least_exponential(key, token // 64)
    own = -tl.log(uniform(random_bits(key, token.to(tl.int64))))
    return -tl.log(exponential + tl.where(token % 64 == place, 0.0, own))


@triton.jit
def compact(chosen, items, target):
    """Store the chosen items at `target`, in order and without gaps, visible to all threads; return their number."""
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.debug_barrier()  # another thread may still read the old items
    tl.store(target + place, items, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def argmax_lowest_id(score, token):
    """Return the best score and the lowest id that has it; id 0 if every score is -inf."""
    best = tl.max(score, 0)
    found = tl.min(tl.where((score == best) & (score > float("-inf")), token, NO_ID), 0)
    return best, tl.where(found == NO_ID, 0, found)


@triton.jit
def ids_of_blocks(blocks, first, count, num_blocks, ROUND: tl.constexpr):
    """Return the blocks [T] of one iteration over a list of blocks, and their ids [T, 64]; past the list's end, ids >= num_ids."""
    t = first + tl.arange(0, ROUND)
    block = tl.load(blocks + t, mask=t < count, other=num_blocks)
    return block, block[:, None] * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)[None, :]


@triton.jit
def list_blocks_from(maxima, blocks, temperature, cut_key, num_blocks, BLOCK_B: tl.constexpr):
    """List the blocks that have an id with a sort key of `cut_key` or more; return their number."""
    count = tl.full([], 0, tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        max_logit = load_scaled(maxima, b, b < num_blocks, temperature)
        count += compact((sort_key(max_logit) >= cut_key) & (max_logit > float("-inf")), b, blocks + count)
    return count


@triton.jit
def best_of_listed(row, ids, count, key, temperature, NOISE_WIDTH: tl.constexpr):
    """Return the best score of `count` listed ids and the lowest id that has it; the list is in ascending order."""
    best_score, best_id = tl.full([], float("-inf"), tl.float64), tl.full([], 0, tl.int32)
    for first in range(0, count, NOISE_WIDTH):
        i = first + tl.arange(0, NOISE_WIDTH)
        token = tl.load(ids + i, mask=i < count, other=0)
        value = load_scaled(row, token, i < count, temperature)
        score, found = argmax_lowest_id(value.to(tl.float64) + gumbel(key, token), token)
        if score > best_score:
            best_score = score
            best_id = found
    return best_score, best_id


@triton.jit
def _candidate_blocks(maxima, noisiest, max_noise, blocks, temperature, cut_key, num_blocks, BLOCK_B: tl.constexpr):
    """List the blocks that may hold the winner; return their number and a lower bound of the winner's score."""
    known_score = tl.full([], float("-inf"), tl.float64)
    for first in range(0, num_blocks, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        noise_bound = tl.load(max_noise + b, mask=b < num_blocks, other=0.0).to(tl.float64) - SLACK
        value = load_scaled(noisiest, b, b < num_blocks, temperature)
        noisiest_score = tl.where(sort_key(value) >= cut_key, value.to(tl.float64) + noise_bound, float("-inf"))
        known_score = tl.maximum(known_score, tl.max(noisiest_score, 0))
    count = tl.full([], 0, tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        noise_bound = tl.load(max_noise + b, mask=b < num_blocks, other=0.0).to(tl.float64) + SLACK
        max_logit = load_scaled(maxima, b, b < num_blocks, temperature)
        may_win = (
            (max_logit.to(tl.float64) + noise_bound >= known_score)
            & (sort_key(max_logit) >= cut_key)
            & (max_logit > float("-inf"))
        )
        count += compact(may_win, b, blocks + count)
    return count, known_score


@triton.jit
def gumbel_argmax(
    row, maxima, noisiest, max_noise, blocks, ids, key, temperature, cut_key, num_ids, num_blocks,
    BLOCK_B: tl.constexpr, ROUND: tl.constexpr, BLOCK_L: tl.constexpr, NOISE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the id with the best score among those with a sort key of `cut_key` or more."""
    num_candidates, known_score = _candidate_blocks(
        maxima, noisiest, max_noise, blocks, temperature, cut_key, num_blocks, BLOCK_B
    )
    best_score, best_id = tl.full([], float("-inf"), tl.float64), tl.full([], 0, tl.int32)
    num_listed = tl.full([], 0, tl.int32)
    for first in range(0, num_candidates, ROUND):
        block, n = ids_of_blocks(blocks, first, num_candidates, num_blocks, ROUND)
        value = load_scaled(row, n, n < num_ids, temperature)
        noise_bound = tl.load(max_noise + block, mask=block < num_blocks, other=0.0).to(tl.float64) + SLACK
        may_win = (
            (value.to(tl.float64) + noise_bound[:, None] >= known_score)
            & (sort_key(value) >= cut_key)
            & (value > float("-inf"))
        )
        flat = tl.reshape(may_win, [ROUND * NOISE_BLOCK])
        num_listed += compact(flat, tl.reshape(n, [ROUND * NOISE_BLOCK]), ids + num_listed)
        if (num_listed > BLOCK_L - ROUND * NOISE_BLOCK) | (first + ROUND >= num_candidates):
            score, found = best_of_listed(row, ids, num_listed, key, temperature, NOISE_WIDTH)
            if score > best_score:  # strictly: earlier ids are lower, and the lowest of equal scores wins
                best_score = score
                best_id = found
            num_listed = tl.full([], 0, tl.int32)
    return best_id


@triton.jit
def mass_from(
    row, maxima, blocks, temperature, max_scaled, cut_key, num_ids, num_blocks, BLOCK_B: tl.constexpr, ROUND: tl.constexpr
):  # fmt: skip
    """Return the mass of a row's ids with a sort key of `cut_key` or more; the most likely id has mass 1."""
    count = list_blocks_from(maxima, blocks, temperature, cut_key, num_blocks, BLOCK_B)
    total = tl.zeros([], tl.float64)
    for first in range(0, count, ROUND):
        _, n = ids_of_blocks(blocks, first, count, num_blocks, ROUND)
        value = load_scaled(row, n, n < num_ids, temperature)
        weight = tl.where(sort_key(value) >= cut_key, tl.exp(value - max_scaled), 0.0)
        total += tl.sum(tl.sum(weight, 1).to(tl.float64), 0)
    return total


@triton.jit
def kth_largest_key(values, places, count, k, temperature, LISTED: tl.constexpr, ROUNDS: tl.constexpr):
    """Return the sort key of the k-th largest of `count` scaled logits, exact in its upper `4 * ROUNDS` bits; the others are 0.

    A radix search: each round counts how many values reach each of 16 thresholds, which settles four more bits. The values are
    `values[i]` for i below `count`, or `values[places[i]]` if LISTED.
    """
    found = tl.full([], LOWEST_KEY, tl.int32)
    thresholds = tl.arange(0, 16)
    for round in range(ROUNDS):
        step = 1 << (28 - 4 * round)
        # summed once after the loop, so that threads need not wait for each other in it
        reaching = tl.zeros([SEARCH_WIDTH, 16], tl.int32)
        for first in range(0, count, SEARCH_WIDTH):
            i = first + tl.arange(0, SEARCH_WIDTH)
            n = tl.load(places + i, mask=i < count, other=0) if LISTED else i
            value = sort_key(load_scaled(values, n, i < count, temperature))
            reaching += ((value[:, None] >= (found + thresholds * step)[None, :]) & (i < count)[:, None]).to(tl.int32)
        # thresholds that k values reach; the first of them is `found` itself
        num_reaching = tl.sum(reaching, 0)
        found += tl.maximum(tl.sum((num_reaching >= k).to(tl.int32), 0) - 1, 0) * step
    return found

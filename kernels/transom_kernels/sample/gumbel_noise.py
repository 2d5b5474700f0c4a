"""Triton functions that the sampling kernels share: Gumbel noise, sortable keys of floats, and stream compaction.

*Gumbel noise* of a token id is `-log(X)` of an exponential variable X. The largest `logit / temperature + noise` of a row is a
sample of its softmax (the Gumbel-max trick). Noise is a function of the row's key and the token id alone; `reference.py` defines
it.

A *sort key* is an int32 made of a float32 so that keys are ordered as the floats are; comparisons and bitwise searches use it.

Legend: B blocks of 64 token ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOISE_BLOCK = tl.constexpr(64)  # token ids of a block; a block's largest noise is one random number
LOWEST_KEY = tl.constexpr(-(2**31))  # below the sort key of every float


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

"""What the sampling kernels share: the noise, the order of floats, and lists that are packed without gaps.

Legend: B blocks of 64 ids, as the noise has them.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOISE_BLOCK = tl.constexpr(64)
LOWEST = tl.constexpr(-(2**31))  # under the order of every float


@triton.jit
def order(x):
    """float32 as int32 that sorts alike; both zeros are 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def load_tempered(row, n, inside, temperature):
    """Values of a row over its temperature, rounded as the reference's; -inf where there are none."""
    value = tl.load(row + n, mask=inside, other=float("-inf"))
    return tl.div_rn(value, tl.zeros_like(value) + temperature)


@triton.jit
def random_bits(key, counter):
    """SplitMix64's finaliser over wrapping 64-bit integers, as unsigned."""
    value = (key + counter * -7046029254386353131).to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def uniform(bits):
    """Inside (0, 1), an odd multiple of 2 ** -53."""
    return ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def least_of_block(key, block):
    """The least exponential variable of each block, float64, and the place in the block that has it."""
    bits = random_bits(key, -1 - block.to(tl.int64))
    return -tl.log(uniform(bits)) / 64, (bits & 63).to(tl.int32)


@triton.jit
def gumbel(key, token):
    """Noise of each token id, float64."""
    exponential, place = least_of_block(key, token // 64)
    own = -tl.log(uniform(random_bits(key, token.to(tl.int64))))
    return -tl.log(exponential + tl.where(token % 64 == place, 0.0, own))


@triton.jit
def pack(chosen, items, target):
    """Writes the items that are chosen side by side, in their order, for all threads to read; how many there are."""
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.debug_barrier()  # some thread may still read what lay there
    tl.store(target + place, items, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)

"""Gumbel noise as a function of (seed, choice, output position, token id): the same on every device and in any batch.

Gumbel-max sampling adds independent Gumbel noise to each logit and takes the largest sum; the result has the softmax
distribution. Gumbel noise is -log(E), where E is an exponential variable.

1. Key: seed, choice and output position are hashed into a row's 64-bit key, in Python integers.
2. Bits: an element's random bits are SplitMix64's finaliser over `key + counter * GOLDEN`, in wrapping int64 tensor arithmetic.
3. Uniform: 52 of the bits and one half make an exact float64, an odd multiple of 2**-53.

Noise is drawn in blocks of 64 token ids, so that whole blocks can be ruled out (see `gumbel_max`). It rests on two facts: the
least of 64 exponential variables is itself exponential, at 64 times the rate, and falls on each id with equal chance; and what
another variable exceeds it by is exponential again. So a block draws its minimum and the id that it falls on, and every other
id adds a draw of its own to the minimum. The 64 variables are independent all the same.

Legend: N elements of any shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK_64 = 2**64 - 1
BLOCK = 64  # token ids


def noise_key(seed: int, choice_index: int, output_position: int) -> int:
    """Return the signed 64-bit key of one row; any Python integers are taken, modulo 2**64."""
    return signed_key(_mixed_with(choice_key(seed, choice_index), output_position))


def choice_key(seed: int, choice_index: int) -> int:
    """Return the unsigned key of a choice, from which the keys of all its output positions are made."""
    return _mixed_with(_mixed_with(0, seed), choice_index)


def position_keys(choice_keys: Sequence[int], output_positions: Sequence[int]) -> NDArray[np.int64]:
    """Return `noise_key` of many rows at once."""
    keys = (np.array(choice_keys, dtype=np.uint64) ^ np.array(output_positions, dtype=np.uint64)) + np.uint64(GOLDEN)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return (keys ^ (keys >> np.uint64(31))).view(np.int64)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise in float64; int64 `keys` [N] and `token_ids` [N] broadcast."""
    return gumbel_within(keys, token_ids, *block_minimum(keys, token_ids // BLOCK))


def block_minimum(keys: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least exponential variable of each block of ids (float64), and the offset in the block that it falls on
    (int64).
    """
    bits = random_bits(keys, -1 - blocks)  # counters of ids are 0, 1, ...; those of blocks are -1, -2, ...
    offset = bits & (BLOCK - 1)  # the lowest bits, which `_to_uniform` leaves out
    return _to_uniform(bits).log_().mul_(-1.0 / BLOCK), offset


def gumbel_within(
    keys: torch.Tensor, token_ids: torch.Tensor, minimum: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """Return the Gumbel noise of ids whose blocks have this minimum at this offset; all arguments broadcast."""
    excess = uniform(keys, token_ids).log_().neg_().masked_fill_(token_ids % BLOCK == offset, 0.0)
    return excess.add_(minimum).log_().neg_()


def uniform(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return uniform noise inside (0, 1) in float64, each an odd multiple of 2**-53."""
    return _to_uniform(random_bits(keys, token_ids))


def random_bits(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Return 64 random bits for each element, as int64."""
    bits = counters * signed_key(GOLDEN) + keys
    shifted = torch.empty_like(bits)
    _xor_shift(bits, shifted, 30).mul_(signed_key(MIX_1))
    _xor_shift(bits, shifted, 27).mul_(signed_key(MIX_2))
    return _xor_shift(bits, shifted, 31)


def _to_uniform(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits >> 12).bitwise_and_(2**52 - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)


def _xor_shift(bits: torch.Tensor, shifted: torch.Tensor, count: int) -> torch.Tensor:
    torch.bitwise_right_shift(bits, count, out=shifted)
    shifted.bitwise_and_(2 ** (64 - count) - 1)  # clears the copies of the sign bit that an int64 shift brings in
    return bits.bitwise_xor_(shifted)


def _mixed_with(key: int, value: int) -> int:
    value = ((key ^ (value & MASK_64)) + GOLDEN) & MASK_64
    value = (value ^ (value >> 30)) * MIX_1 & MASK_64
    value = (value ^ (value >> 27)) * MIX_2 & MASK_64
    return value ^ (value >> 31)


def signed_key(value: int) -> int:
    """Return an unsigned 64-bit integer as the signed one with the same bits."""
    return value - 2**64 if value >= 2**63 else value

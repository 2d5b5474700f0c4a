"""Counter-based sampling noise: f(seed, choice, output position, vocabulary id), the same on every device and in any batch.

Legend: N elements of any shape.

A row's 64-bit key is hashed from seed, choice and position in Python integers; an element's bits are SplitMix64's finaliser
over `key + counter * GOLDEN`, in wrapping int64 tensor arithmetic. Bits become a uniform exactly: 52 of them plus a half fit
a float64's 53.

Ids are noisy in blocks of 64, so that whole blocks can be ruled out (see `race`). Of 64 exponential variables the least is
exponential at 64 times the rate, falls on each id alike, and what the others have above it is exponential again: so a block
draws its minimum and that minimum's id, and every other id adds its own draw. The 64 are independent all the same.
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
BLOCK = 64  # ids


def noise_key(seed: int, choice_index: int, output_position: int) -> int:
    """The signed 64-bit key of one row; any Python ints are taken, modulo 2**64."""
    return _signed(_mixed_with(choice_key(seed, choice_index), output_position))


def choice_key(seed: int, choice_index: int) -> int:
    """What the keys of all positions of a choice come from, unsigned."""
    return _mixed_with(_mixed_with(0, seed), choice_index)


def position_keys(choice_keys: Sequence[int], output_positions: Sequence[int]) -> NDArray[np.int64]:
    """`noise_key` of many rows at once."""
    keys = (np.array(choice_keys, dtype=np.uint64) ^ np.array(output_positions, dtype=np.uint64)) + np.uint64(GOLDEN)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return (keys ^ (keys >> np.uint64(31))).view(np.int64)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise in float64; int64 `keys` [N] and `token_ids` [N] broadcast."""
    return gumbel_within(keys, token_ids, *block_minimum(keys, token_ids // BLOCK))


def block_minimum(keys: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least exponential variable of each block of ids (float64), and the place in the block that it falls on (int64)."""
    bits = random_bits(keys, -1 - blocks)  # ids count up from 0, blocks down from -1
    place = bits & (BLOCK - 1)  # the lowest bits, which `_to_uniform` leaves out
    return _to_uniform(bits).log_().mul_(-1.0 / BLOCK), place


def gumbel_within(
    keys: torch.Tensor, token_ids: torch.Tensor, minimum: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Gumbel noise of ids whose blocks have that minimum at that place; all broadcast."""
    more = uniform(keys, token_ids).log_().neg_().masked_fill_(token_ids % BLOCK == place, 0.0)
    return more.add_(minimum).log_().neg_()


def uniform(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Uniform noise inside (0, 1) in float64, exact: an odd multiple of 2**-53."""
    return _to_uniform(random_bits(keys, token_ids))


def random_bits(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """64 random bits per element as int64."""
    bits = counters * _signed(GOLDEN) + keys
    shifted = torch.empty_like(bits)
    _xor_shift(bits, shifted, 30).mul_(_signed(MIX_1))
    _xor_shift(bits, shifted, 27).mul_(_signed(MIX_2))
    return _xor_shift(bits, shifted, 31)


def _to_uniform(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits >> 12).bitwise_and_(2**52 - 1)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)


def _xor_shift(bits: torch.Tensor, shifted: torch.Tensor, count: int) -> torch.Tensor:
    torch.bitwise_right_shift(bits, count, out=shifted)
    shifted.bitwise_and_(2 ** (64 - count) - 1)  # int64 shifts drag the sign along
    return bits.bitwise_xor_(shifted)


def _mixed_with(key: int, value: int) -> int:
    value = ((key ^ (value & MASK_64)) + GOLDEN) & MASK_64
    value = (value ^ (value >> 30)) * MIX_1 & MASK_64
    value = (value ^ (value >> 27)) * MIX_2 & MASK_64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value

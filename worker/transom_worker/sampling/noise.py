"""Computes the 64-bit key of a row's sampling noise: SplitMix64's finaliser mixes in seed, choice and output position in turn.

`transom_kernels.sample.reference.gumbel` turns a key and a token id into noise, which is the same on every device and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transom_kernels.sample.reference import GOLDEN, MIX_1, MIX_2

MASK_64 = 2**64 - 1


def choice_key(seed: int, choice_index: int) -> int:
    """Return the unsigned key of a choice, from which the keys of all its output positions are made.

    Arguments may be any Python integers and count modulo 2**64.
    """
    return _mixed_with(_mixed_with(0, seed), choice_index)


def position_keys(choice_keys: Sequence[int], output_positions: Sequence[int]) -> NDArray[np.int64]:
    """Return the signed 64-bit keys of many rows at once, from their choice keys."""
    keys = (np.array(choice_keys, dtype=np.uint64) ^ np.array(output_positions, dtype=np.uint64)) + np.uint64(GOLDEN)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return (keys ^ (keys >> np.uint64(31))).view(np.int64)


def _mixed_with(key: int, value: int) -> int:
    """Return the SplitMix64 finaliser of (key xor value) + GOLDEN; `position_keys` computes the same with numpy."""
    value = ((key ^ (value & MASK_64)) + GOLDEN) & MASK_64
    value = (value ^ (value >> 30)) * MIX_1 & MASK_64
    value = (value ^ (value >> 27)) * MIX_2 & MASK_64
    return value ^ (value >> 31)


def signed_key(value: int) -> int:
    """Return an unsigned 64-bit integer as the signed one with the same bits."""
    return value - 2**64 if value >= 2**63 else value

"""`LoadRates`: what computing a token costs, and what loading a block from the host tier costs, in whole nanoseconds.

The hit search weighs them against each other (`prefix_search`). Worker and router must find the same, so the rates are integers
that change only in steps, each of which is a numbered change of the prefix index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

UNMEASURED_TOKEN_NS = 1_000_000
UNMEASURED_BYTES_PER_S = 8 * 2**30


class LoadRates(NamedTuple):
    """Nanoseconds to compute one prompt token, and to load one block of each group from the host."""

    token_ns: int
    block_ns: tuple[int, ...]

    @classmethod
    def unmeasured(cls, block_bytes: Sequence[int]) -> LoadRates:
        """Return the rates that hold until steps and loads have been measured; `block_bytes` are by group."""
        return cls(UNMEASURED_TOKEN_NS, tuple(size * 10**9 // UNMEASURED_BYTES_PER_S for size in block_bytes))

    def load_ns(self, num_blocks: Sequence[int]) -> int:
        """Return the nanoseconds to load so many blocks of each group."""
        return sum(count * ns for count, ns in zip(num_blocks, self.block_ns, strict=True))

"""`LoadRates`: the costs, in whole nanoseconds, of computing a token, of loading a block from the host tier, and of reading a block
from the disk tier.

The hit search weighs them against each other (`prefix_search`). Worker and router must find the same hits, so the rates are
integers, and each change of them is a numbered change of the prefix index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Assumed until steps, loads from the host tier and reads from the disk have been measured.
UNMEASURED_TOKEN_NS = 1_000_000
UNMEASURED_BYTES_PER_S = 8 * 2**30
UNMEASURED_READ_BYTES_PER_S = 10**9
LEAST_READ_TOKENS = 128  # a hit on the disk must save this many: reading holds the request for a step or two


class LoadRates(NamedTuple):
    """Nanoseconds to compute one prompt token, to load one block of each group from the host, and to read one of each group from
    the disk into the host's memory; empty without a disk tier."""

    token_ns: int
    block_ns: tuple[int, ...]
    read_ns: tuple[int, ...] = ()

    @classmethod
    def unmeasured(cls, block_bytes: Sequence[int]) -> LoadRates:
        """Return the rates that hold until steps and loads have been measured; `block_bytes` are by group."""
        return cls(UNMEASURED_TOKEN_NS, tuple(size * 10**9 // UNMEASURED_BYTES_PER_S for size in block_bytes))

    def with_unmeasured_reads(self, block_bytes: Sequence[int]) -> LoadRates:
        """Return the same rates with those of a disk tier from which nothing was read yet."""
        return self._replace(read_ns=tuple(size * 10**9 // UNMEASURED_READ_BYTES_PER_S for size in block_bytes))

    def load_ns(self, num_blocks: Sequence[int]) -> int:
        """Return the nanoseconds to load `num_blocks[group]` blocks of each group."""
        return sum(count * ns for count, ns in zip(num_blocks, self.block_ns, strict=True))

    def reading_ns(self, num_blocks: Sequence[int]) -> int:
        """Return the nanoseconds to read `num_blocks[group]` blocks of each group from the disk."""
        return sum(count * ns for count, ns in zip(num_blocks, self.read_ns, strict=True))

    def are_worth_reading(self, spared_tokens: int, *, more_ns: int) -> bool:
        """Return whether a hit that needs the disk is better than one that does not: it spares `spared_tokens` more tokens, and its
        loads and reads take `more_ns` longer."""
        return spared_tokens >= LEAST_READ_TOKENS and spared_tokens * self.token_ns >= more_ns

"""Tile sizes of the router kernels.

The product of N elements is split into *splits* of equal length; each split is a partial sum (split-K).

Legend: T tokens, N hidden width, E experts, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

from transom_kernels.launch import next_power_of_two

MIN_SPLIT = 128  # elements of N
# partial logits of a token (16 KiB): enough for one program per multiprocessor of an H200 with tiles of 32 experts
MAX_PARTIALS = 4096
FEW_TOKENS = 256  # up to so many tokens (a decoding batch) tiles are small
MIN_EXPERTS = 16  # of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile of the router's product: tokens, experts, elements of N per iteration; warps and pipeline stages."""

    block_t: int
    block_e: int
    block_n: int
    num_warps: int
    num_stages: int = 3


def choose_tile(num_tokens: int, num_experts: int) -> Tile:
    """The tile of the product for a batch. All tiles add up in an equal order."""
    experts = max(MIN_EXPERTS, next_power_of_two(num_experts))
    if num_tokens <= FEW_TOKENS:
        return Tile(block_t=16, block_e=min(32, experts), block_n=32, num_warps=2)
    return Tile(block_t=64, block_e=min(64, experts), block_n=32 if experts > 32 else 16, num_warps=4)


def split_of(width: int, num_experts: int) -> int:
    """Elements of N per split. The number of tokens does not matter, so a token's sums have one order in every batch."""
    most, split = max(1, MAX_PARTIALS // next_power_of_two(num_experts)), MIN_SPLIT
    while -(-width // split) > most:
        split *= 2
    return split


def read_blocks(num_splits: int, num_experts: int) -> tuple[int, int, int]:
    """Splits and experts (padded) that a program of `choose_experts` reads, and its warps."""
    block_s, block_e = next_power_of_two(num_splits), max(MIN_EXPERTS, next_power_of_two(num_experts))
    return block_s, block_e, min(8, max(1, block_s * block_e // 1024))

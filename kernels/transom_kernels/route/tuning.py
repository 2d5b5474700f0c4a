"""Tiles of the router's product, and how the choice reads what it left.

Legend: T tokens, N hidden width, E experts, S parts of a sum over N.
"""

from __future__ import annotations

from dataclasses import dataclass

from transom_kernels.launch import next_power_of_two

LEAST_SPLIT = 128  # elements of N that a program adds up
# of a token's logits: 16 KiB, and one program for each of an H200's processors where 32 experts are a tile
MOST_PARTS = 4096
FEW_TOKENS = 256  # up to which tiles are small: a decoding batch
LEAST_EXPERTS = 16  # of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tokens, experts and elements of a round; warps and pipeline stages."""

    block_t: int
    block_e: int
    block_n: int
    num_warps: int
    num_stages: int = 3


def choose_tile(num_tokens: int, num_experts: int) -> Tile:
    """Of the product; each has the same order of sums."""
    experts = max(LEAST_EXPERTS, next_power_of_two(num_experts))
    if num_tokens <= FEW_TOKENS:
        return Tile(block_t=16, block_e=min(32, experts), block_n=32, num_warps=2)
    return Tile(block_t=64, block_e=min(64, experts), block_n=32 if experts > 32 else 16, num_warps=4)


def split_of(width: int, num_experts: int) -> int:
    """Elements of N of a part. The number of tokens has no say, so that a sum's order is the same for one and for many."""
    most, split = max(1, MOST_PARTS // next_power_of_two(num_experts)), LEAST_SPLIT
    while -(-width // split) > most:
        split *= 2
    return split


def read_blocks(num_splits: int, num_experts: int) -> tuple[int, int, int]:
    """Parts and experts, padded, that a program of the choice reads, and its warps."""
    block_s, block_e = next_power_of_two(num_splits), max(LEAST_EXPERTS, next_power_of_two(num_experts))
    return block_s, block_e, min(8, max(1, block_s * block_e // 1024))

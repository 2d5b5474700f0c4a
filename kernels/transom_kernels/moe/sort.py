"""`dispatch.block_rows` for a few pairs, in one program: a dozen small operators would take longer than the products.

Legend: P pairs of token and expert, E experts, M rows of a block, C pairs or blocks a round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from transom_kernels.launch import next_power_of_two

MOST_PAIRS = 1024
ROUND_ELEMENTS = 16_384  # rounds times experts, in registers


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def sort_pairs(
    experts,  # [P] int64
    pairs,  # [blocks, M] int32, full of P
    block_expert,  # [blocks] int32
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Counts, where each expert's blocks begin, then every pair's place: behind earlier pairs of its expert."""
    e, c = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_pairs, BLOCK_C):
        mine = tl.load(experts + first + c, mask=first + c < num_pairs, other=-1).to(tl.int32)
        counts += tl.sum((mine[:, None] == e[None, :]).to(tl.int32), 0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, 0)
    for first in range(0, num_blocks, BLOCK_C):
        over = (ends[None, :] <= (first + c)[:, None]) & (e < NUM_EXPERTS)[None, :]
        expert = tl.sum(over.to(tl.int32), 1)
        tl.store(block_expert + first + c, tl.where(expert < NUM_EXPERTS, expert, -1), mask=first + c < num_blocks)
    next_place = (ends - blocks) * BLOCK_M
    for first in range(0, num_pairs, BLOCK_C):
        mine = tl.load(experts + first + c, mask=first + c < num_pairs, other=-1).to(tl.int32)
        others = tl.load(experts + first + c, mask=first + c < num_pairs, other=-2).to(tl.int32)
        earlier = (mine[:, None] == others[None, :]) & (c[None, :] < c[:, None])
        is_mine = mine[:, None] == e[None, :]
        place = tl.sum(tl.where(is_mine, next_place[None, :], 0), 1) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(pairs + place, first + c, mask=first + c < num_pairs)
        next_place += tl.sum(is_mine.to(tl.int32), 0)


def block_rows_triton(experts_P: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `dispatch.block_rows`; for at most `MOST_PAIRS`."""
    num_pairs, device = len(experts_P), experts_P.device
    num_blocks = min(num_pairs, -(-num_pairs // block_m) + num_experts)
    pairs = torch.full((num_blocks, block_m), num_pairs, dtype=torch.int32, device=device)
    block_expert = torch.empty(num_blocks, dtype=torch.int32, device=device)
    block_e, block_c = sort_blocks(num_experts)
    if num_pairs:
        sort_pairs[(1,)](
            experts_P, pairs, block_expert, num_pairs, num_blocks,
            NUM_EXPERTS=num_experts, BLOCK_M=block_m, BLOCK_E=block_e, BLOCK_C=block_c, num_warps=8,
        )  # fmt: skip
    return pairs, block_expert


def sort_blocks(num_experts: int) -> tuple[int, int]:
    """Experts, padded, and pairs of a round."""
    block_e = max(16, next_power_of_two(num_experts))
    return block_e, min(64, max(16, ROUND_ELEMENTS // block_e))

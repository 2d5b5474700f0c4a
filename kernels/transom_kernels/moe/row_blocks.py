"""Sorts (token, expert) pairs by expert into row blocks for the grouped matmuls of an MoE layer, on the device.

A *pair* is a token and one expert that it chose; pair `p` is choice `p % K` of token `p // K`. A *row block* is M pairs of one
expert. Example with M = 4: pairs with experts [2, 0, 2, 2, 0, 2, 2] become the row blocks

    expert 0: [1, 4, -, -]      expert 2: [0, 2, 3, 5]      expert 2: [6, -, -, -]       where - is padding

Legend: P pairs, E experts, K experts per token, M rows of a block, C pairs or blocks of an iteration.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from transom_kernels.launch import next_power_of_two
from transom_kernels.prepared_launch import PreparedLaunch

MAX_PAIRS = 1024  # up to this many pairs one program is faster than torch's operators
FILLED_AT_ONCE = tl.constexpr(1024)  # elements of row blocks
ITERATION_ELEMENTS = 16_384  # pairs of an iteration times experts, in registers


def block_rows(experts_P: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row blocks of the pairs sorted by expert; the pairs of each expert are padded to whole blocks.

    The result is the pairs [blocks, M] int32 (P is padding) and each block's expert [blocks] int32 (-1: the block is empty). The
    number of blocks is the most that P pairs may need: each expert has at most one block that is not full, and no block is without
    pairs. It depends on shapes alone, so the host does not wait for the device.
    """
    num_pairs, device = len(experts_P), experts_P.device
    num_blocks = min(num_pairs, -(-num_pairs // block_m) + num_experts) if num_pairs else 0
    order_P = experts_P.argsort(stable=True)
    sorted_P = experts_P[order_P]
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=device).scatter_add_(
        0, experts_P, torch.ones_like(experts_P)
    )
    blocks_E = (counts_E + block_m - 1) // block_m
    ends_E = blocks_E.cumsum(0)
    first_pair_E = counts_E.cumsum(0) - counts_E
    first_block_E = ends_E - blocks_E
    position_P = first_block_E[sorted_P] * block_m + torch.arange(num_pairs, device=device) - first_pair_E[sorted_P]
    pairs = torch.full((num_blocks * block_m,), num_pairs, dtype=torch.int32, device=device)
    pairs[position_P] = order_P.to(torch.int32)
    block = torch.arange(num_blocks, device=device)
    expert = torch.searchsorted(ends_E, block, right=True)
    return pairs.view(num_blocks, block_m), torch.where(expert < num_experts, expert, -1).to(torch.int32)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def sort_pairs(
    experts,  # [P] int64
    pairs,  # [blocks, M] int32
    block_expert,  # [blocks] int32
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Place every pair in a row block of its expert, after the earlier pairs of that expert. The grid is (1)."""
    e, c = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    # padding everywhere; pairs overwrite theirs below
    i = tl.arange(0, FILLED_AT_ONCE)
    for first in range(0, num_blocks * BLOCK_M, FILLED_AT_ONCE):
        tl.store(pairs + first + i, num_pairs, mask=first + i < num_blocks * BLOCK_M)
    # count the pairs of each expert
    counts = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_pairs, BLOCK_C):
        expert_of = tl.load(experts + first + c, mask=first + c < num_pairs, other=-1).to(tl.int32)
        counts += tl.sum((expert_of[:, None] == e[None, :]).to(tl.int32), 0)
    # row blocks of each expert, and each row block's expert
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, 0)
    for first in range(0, num_blocks, BLOCK_C):
        ended_before = (ends[None, :] <= (first + c)[:, None]) & (e < NUM_EXPERTS)[None, :]
        expert = tl.sum(ended_before.to(tl.int32), 1)
        tl.store(block_expert + first + c, tl.where(expert < NUM_EXPERTS, expert, -1), mask=first + c < num_blocks)
    # place the pairs
    tl.debug_barrier()  # wait until all warps have stored their padding
    next_position = (ends - blocks) * BLOCK_M
    for first in range(0, num_pairs, BLOCK_C):
        expert_of = tl.load(experts + first + c, mask=first + c < num_pairs, other=-1).to(tl.int32)
        # padding differs in both loads (-1, -2), so that it matches nothing
        others = tl.load(experts + first + c, mask=first + c < num_pairs, other=-2).to(tl.int32)
        earlier = (expert_of[:, None] == others[None, :]) & (c[None, :] < c[:, None])
        is_expert = expert_of[:, None] == e[None, :]
        place = tl.sum(tl.where(is_expert, next_position[None, :], 0), 1) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(pairs + place, first + c, mask=first + c < num_pairs)
        next_position += tl.sum(is_expert.to(tl.int32), 0)


def block_rows_triton(experts_P: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `block_rows` in one program, for at most `MAX_PAIRS` pairs: torch's dozen operators take longer than the matmuls."""
    num_pairs = experts_P.shape[0]
    num_blocks = min(num_pairs, -(-num_pairs // block_m) + num_experts)
    pairs = experts_P.new_empty(num_blocks, block_m, dtype=torch.int32)
    block_expert = experts_P.new_empty(num_blocks, dtype=torch.int32)
    if num_pairs:
        _sort(num_experts, block_m)((1, 1, 1), (experts_P, pairs, block_expert), num_pairs, num_blocks)
    return pairs, block_expert


@cache
def _sort(num_experts: int, block_m: int) -> PreparedLaunch:
    block_e, block_c = sort_blocks(num_experts)
    sizes = {"NUM_EXPERTS": num_experts, "BLOCK_M": block_m, "BLOCK_E": block_e, "BLOCK_C": block_c}
    return PreparedLaunch(sort_pairs, sizes, num_warps=8)


def sort_blocks(num_experts: int) -> tuple[int, int]:
    """Return the experts, padded to a power of two, and the pairs of an iteration."""
    block_e = max(16, next_power_of_two(num_experts))
    return block_e, min(64, max(16, ITERATION_ELEMENTS // block_e))

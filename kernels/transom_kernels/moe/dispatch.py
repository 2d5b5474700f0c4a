"""Sorts (token, expert) pairs by expert into row blocks for the grouped matmuls, on the device, without waiting for a count.

A *pair* is a token and one expert that it chose; pair `p` is choice `p % K` of token `p // K`. A *row block* is M pairs of one
expert. Example with M = 4: pairs with experts [2, 0, 2, 2, 0, 2, 2] become the row blocks

    expert 0: [1, 4, -, -]      expert 2: [0, 2, 3, 5]      expert 2: [6, -, -, -]       where - is padding

Legend: P pairs, E experts, K experts per token, M rows of a block.
"""

from __future__ import annotations

import torch


def block_rows(experts_P: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row blocks of pairs sorted by expert, each expert's padded to whole blocks.

    Returns the pairs [blocks, M] int32 (P for padding) and each block's expert [blocks] int32 (-1: the block is not needed). The
    number of blocks depends on shapes alone, so nothing waits for the device.
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

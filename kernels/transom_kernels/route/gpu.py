"""Launches of the two router kernels: `score_experts` (partial logits) and `choose_experts`.

Legend: T tokens, N hidden width, E experts, K experts per token, S splits of N.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import next_power_of_two
from transom_kernels.route.kernel import choose_experts, score_experts
from transom_kernels.route.rule import TINY, Routing
from transom_kernels.route.tuning import choose_tile, read_blocks, split_of

SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}  # numbers that `choose_experts` knows


def route_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract is that of `op.route`."""
    tokens, num_experts, num_chosen = len(x), len(weight), routing.num_chosen
    experts = torch.empty((tokens, num_chosen), dtype=torch.int64, device=x.device)
    weights = torch.empty((tokens, num_chosen), dtype=torch.float32, device=x.device)
    if not tokens:
        return experts, weights
    partials = partial_logits_triton(x if x.stride(1) == 1 else x.contiguous(), weight)
    block_s, block_e, num_warps = read_blocks(partials.shape[1], num_experts)
    vectors = [partials if vector is None else vector.contiguous() for vector in (bias, correction, expert_scale)]
    choose_experts[(tokens,)](
        partials, *vectors, experts if chosen is None else chosen.contiguous(), experts, weights, routing.scale, TINY,
        E=num_experts, K=num_chosen, SPLITS=partials.shape[1], SCORE=SCORES[routing.score], NORMALISE=routing.normalise,
        HAS_BIAS=bias is not None, HAS_CORRECTION=correction is not None, HAS_SCALE=expert_scale is not None,
        IS_FIXED=chosen is not None, BLOCK_E=block_e, BLOCK_K=next_power_of_two(num_chosen), BLOCK_S=block_s,
        num_warps=num_warps,
    )  # fmt: skip
    return experts, weights


def partial_logits_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Partial logits [T, S, E] float32, each over some elements of N; their sum over S is the logits without bias."""
    (tokens, width), num_experts = x.shape, len(weight)
    split, tile = split_of(width, num_experts), choose_tile(tokens, num_experts)
    num_splits = -(-width // split)
    partials = torch.empty((tokens, num_splits, num_experts), dtype=torch.float32, device=x.device)
    score_experts[(-(-tokens // tile.block_t), -(-num_experts // tile.block_e), num_splits)](
        x, weight, partials, tokens, x.stride(0), weight.stride(0), weight.stride(1),
        E=num_experts, N=width, SPLIT=split, BLOCK_T=tile.block_t, BLOCK_E=tile.block_e, BLOCK_N=tile.block_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return partials

"""Launches of the router's CPU kernels: `score_experts` (logits) and `choose_experts`.

Legend: T tokens, N hidden width, E experts, K experts per token.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.target import cpu_target
from transom_kernels.route.rule import TINY, Routing

EXPERTS_PER_ITEM = 16
TILE = 4 if cpu_target().avx512 else 2  # tokens and experts of a tile: its sums fill the registers
MODULE = "transom_kernels.route.cpu_kernel"


def fits_cpu(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels take tensors of this dtype and of these strides."""
    return x.dtype in DTYPES and (x.stride(1) == 1 or x.shape[1] == 1) and weight.stride(1) == 1


def route_cpu(
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
    (tokens, width), num_experts, num_chosen = x.shape, len(weight), routing.num_chosen
    logits = empty((tokens, num_experts), torch.float32)
    launch(
        cpu_kernel(
            MODULE, "make_score_experts", dtype=DTYPES[x.dtype], tile_size=TILE, experts_per_item=EXPERTS_PER_ITEM
        ),
        -(-tokens // TILE) * -(-num_experts // EXPERTS_PER_ITEM),
        [x, weight, logits, tokens, width, num_experts, x.stride(0) * x.itemsize, weight.stride(0) * 4],
    )
    experts, weights = empty((tokens, num_chosen), torch.int64), empty((tokens, num_chosen), torch.float32)
    vectors = [None if vector is None else vector.contiguous() for vector in (bias, correction, expert_scale, chosen)]
    launch(
        cpu_kernel(MODULE, "make_choose_experts", score=routing.score),
        tokens,
        [
            logits, *vectors, experts, weights, num_experts, num_chosen, int(routing.normalise), float(routing.scale),
            TINY,
        ],
        scratch_bytes=8 * (num_experts + 16),
    )  # fmt: skip
    return experts, weights

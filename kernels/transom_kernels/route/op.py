"""`route`: every token's experts and their weights, by a product in float32 and a choice.

Legend: T tokens, N hidden width, E experts, K experts per token.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import uses_triton
from transom_kernels.route.reference import route_reference
from transom_kernels.route.rule import Routing


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [T, K] int64 and weights [T, K] float32 of `x` [T, N] by `weight` [E, N] and `routing`.

    Logits are `x @ weight.T + bias`, in float32 whatever `x` is: two experts may be close together. `correction` [E] is added to
    scores for the choice, `expert_scale` [E] multiplies weights in the end; `chosen` [T, K] int64, each within the experts, fixes
    the choice. Equal experts are chosen in their order, and NaN comes first, so that there are K different experts whatever `x`
    is. Where Triton computes, a token's routes do not depend on the others.

    Raises:
        ValueError: shapes or dtypes that do not fit, or more experts to choose than there are.
    """
    _check(x, weight, routing, (bias, correction, expert_scale), chosen)
    if uses_triton(x):
        from transom_kernels.route.gpu import route_triton

        return route_triton(
            x, weight, routing, bias=bias, correction=correction, expert_scale=expert_scale, chosen=chosen
        )
    return route_reference(
        x, weight, routing, bias=bias, correction=correction, expert_scale=expert_scale, chosen=chosen
    )


def arranged(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [E, N] as `route` reads it fastest: for the kernel an element of all experts lies in one piece of memory."""
    return weight.t().contiguous().t() if uses_triton(weight) else weight.contiguous()


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    vectors: tuple[torch.Tensor | None, ...],
    chosen: torch.Tensor | None,
) -> None:
    """`vectors` have an element for each expert."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or weight.dtype != torch.float32:
        raise ValueError(
            f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)} {weight.dtype}: give [T, N], and [E, N] in float32."
        )
    num_experts, num_chosen = len(weight), routing.num_chosen
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(
            f"{num_chosen} experts per token are to be chosen from {num_experts}; choose 1 to {num_experts}."
        )
    given = [part for part in vectors if part is not None]
    if any(part.shape != (num_experts,) or part.dtype != torch.float32 for part in given):
        shapes = [(tuple(part.shape), part.dtype) for part in given]
        raise ValueError(f"bias, correction and scale are {shapes}; each is [{num_experts}] in float32.")
    if chosen is not None and (chosen.shape != (len(x), num_chosen) or chosen.dtype != torch.int64):
        raise ValueError(
            f"chosen is {tuple(chosen.shape)} {chosen.dtype}; {len(x)} tokens take [{len(x)}, {num_chosen}] int64."
        )

"""The operator `route`, an MoE router: chooses each token's experts and computes their weights.

    logits = x @ weight^T + bias,  scores = softmax, sigmoid or sqrt(softplus) of the logits
    chosen = the K largest of logits (or scores + correction),  weights = scores[chosen], normalised, * scale * expert_scale

Legend: T tokens, N hidden width, E experts, K experts per token.
"""

from typing import Any

import torch

from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton
from transom_kernels.route.cpu import fits_cpu, route_cpu
from transom_kernels.route.reference import Routing, route_reference


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    launches: dict[Any, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts [T, K] int64 and weights [T, K] float32 of `x` [T, N], by the router matrix `weight` [E, N] float32.

    Logits are `x @ weight.T + bias`, in float32 for any dtype of `x`, since the logits of two experts may be close. `correction`
    [E] is added to scores for the choice only; `expert_scale` [E] multiplies final weights; `chosen` [T, K] int64 (expert ids)
    fixes the choice. Of equally good experts the first are chosen, and NaN counts as largest, so a token always gets K different
    experts. A layer passes the same `launches`, empty at first, at every call, so that its tensors are checked only once. With
    kernels a token's experts and weights do not depend on the other tokens.

    Raises:
        ValueError: shapes or dtypes do not fit, or more experts are to be chosen than there are.
    """
    if not launches or chosen is not None or x.shape[1] != weight.shape[1]:
        _check(x, weight, routing, (bias, correction, expert_scale), chosen)
    given = {"bias": bias, "correction": correction, "expert_scale": expert_scale, "chosen": chosen}
    if uses_triton(x):
        found: tuple[torch.Tensor, torch.Tensor] = implementation("route.gpu", "route_triton")(
            x, weight, routing, **given, launches=launches
        )
        return found
    if uses_cpu_kernels(x) and fits_cpu(x, weight):
        return route_cpu(x, weight, routing, **given)
    return route_reference(x, weight, routing, **given)


def router_layout(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [E, N] in the memory layout that `route` reads fastest: column-major for Triton, else row-major."""
    return weight.t().contiguous().t() if uses_triton(weight) else weight.contiguous()


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    vectors: tuple[torch.Tensor | None, ...],
    chosen: torch.Tensor | None,
) -> None:
    """Raise ValueError for arguments that do not fit; `vectors` have one float32 element per expert."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or weight.dtype != torch.float32:
        raise ValueError(
            f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)} {weight.dtype}: give [T, N], and [E, N] in float32."
        )
    num_experts, num_chosen = len(weight), routing.num_chosen
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(
            f"{num_chosen} experts per token are to be chosen from {num_experts}; choose 1 to {num_experts}."
        )
    groups, top = routing.num_groups, routing.top_groups
    if groups > 1 and (num_experts % groups or not 1 <= top <= groups or num_chosen > top * (num_experts // groups)):
        raise ValueError(f"{num_chosen} of {num_experts} experts cannot be chosen from {top} of {groups} equal groups.")
    given = [vector for vector in vectors if vector is not None]
    if any(vector.shape != (num_experts,) or vector.dtype != torch.float32 for vector in given):
        shapes = [(tuple(vector.shape), vector.dtype) for vector in given]
        raise ValueError(f"bias, correction and scale are {shapes}; each is [{num_experts}] in float32.")
    if chosen is not None and (chosen.shape != (len(x), num_chosen) or chosen.dtype != torch.int64):
        raise ValueError(
            f"chosen is {tuple(chosen.shape)} {chosen.dtype}; {len(x)} tokens take [{len(x)}, {num_chosen}] int64."
        )

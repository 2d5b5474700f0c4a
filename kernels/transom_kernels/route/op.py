"""The operator `route`, an MoE router: chooses each token's experts and computes their weights.

    logits = x @ weight^T + bias,  scores = softmax, sigmoid or sqrt(softplus) of the logits
    chosen = the K largest of logits (or scores + correction),  weights = scores[chosen], normalised, * scale * expert_scale

Legend: T tokens, N hidden width, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]

TINY = 1e-20  # added to a sum of scores before it divides, since all scores may have been rounded to zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How many experts a token chooses, and their weights.

    A token chooses the experts with the largest logits or, if the layer has a learned correction, the largest score + correction;
    of equal ones the first. An expert's weight is its score times `scale`; with `normalise` a token's weights add up to `scale`.
    """

    num_chosen: int  # experts per token (top-k)
    score: Score = "softmax"
    normalise: bool = True
    scale: float = 1.0  # multiplies all weights


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
    """Return the experts [T, K] int64 and weights [T, K] float32 of `x` [T, N], by the router matrix `weight` [E, N] float32.

    Logits are `x @ weight.T + bias`, in float32 for any dtype of `x`, since the logits of two experts may be close. `correction`
    [E] is added to scores for the choice only; `expert_scale` [E] multiplies final weights; `chosen` [T, K] int64 (expert ids)
    fixes the choice. Of equally good experts the first are chosen, and NaN counts as largest, so a token always gets K different
    experts. With kernels a token's experts and weights do not depend on the other tokens.

    Raises:
        ValueError: shapes or dtypes do not fit, or more experts are to be chosen than there are.
    """
    _check(x, weight, routing, (bias, correction, expert_scale), chosen)
    given = {"bias": bias, "correction": correction, "expert_scale": expert_scale, "chosen": chosen}
    if uses_triton(x):
        found: tuple[torch.Tensor, torch.Tensor] = implementation("route.gpu", "route_triton")(
            x, weight, routing, **given
        )
        return found
    if uses_cpu_kernels(x):
        from transom_kernels.route.cpu import fits_cpu, route_cpu

        if fits_cpu(x, weight):
            return route_cpu(x, weight, routing, **given)
    return route_reference(x, weight, routing, **given)


def router_layout(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [E, N] in the memory layout that `route` reads fastest: column-major for Triton, else row-major."""
    return weight.t().contiguous().t() if uses_triton(weight) else weight.contiguous()


def route_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    *,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `route` in torch: the specification."""
    logits = F.linear(x.float(), weight, bias)
    return routes_of(logits, routing, correction=correction, expert_scale=expert_scale, chosen=chosen)


def routes_of(
    logits: torch.Tensor,
    routing: Routing,
    *,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts and their weights [T, K] from a router's logits [T, E].

    Some models take a softmax over the chosen logits alone. That equals a softmax over all logits whose chosen scores are then
    normalised, so it needs no score of its own.
    """
    scores = _scores(logits, routing.score)
    if chosen is None:
        preference = logits if correction is None else scores + correction
        chosen = _largest(preference, routing.num_chosen)
    weights = scores.gather(1, chosen)
    if routing.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    weights = weights * routing.scale
    return chosen, weights if expert_scale is None else weights * expert_scale[chosen]


def _largest(preference: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` largest numbers of each row: NaN first, then in descending order, equal ones by index."""
    best = preference.topk(min(count + 1, preference.shape[1]), dim=-1)
    if bool((best.values[:, 1:] < best.values[:, :-1]).all()):
        return best.indices[:, :count].contiguous()
    # topk does not define the order of equal numbers; a stable sort does, but takes three times as long on CPUs
    return preference.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _scores(logits: torch.Tensor, score: Score) -> torch.Tensor:
    """Return the scores [T, E] of logits."""
    match score:
        case "softmax":
            return logits.softmax(dim=-1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrt_softplus":
            return F.softplus(logits).sqrt()


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
    given = [vector for vector in vectors if vector is not None]
    if any(vector.shape != (num_experts,) or vector.dtype != torch.float32 for vector in given):
        shapes = [(tuple(vector.shape), vector.dtype) for vector in given]
        raise ValueError(f"bias, correction and scale are {shapes}; each is [{num_experts}] in float32.")
    if chosen is not None and (chosen.shape != (len(x), num_chosen) or chosen.dtype != torch.int64):
        raise ValueError(
            f"chosen is {tuple(chosen.shape)} {chosen.dtype}; {len(x)} tokens take [{len(x)}, {num_chosen}] int64."
        )

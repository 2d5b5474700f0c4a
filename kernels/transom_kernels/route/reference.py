"""The specification of `route`, and its implementation where Triton does not compute.

Legend: T tokens, N hidden width, E experts, K experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from transom_kernels.route.rule import TINY, Routing, Score


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
    """The contract is that of `op.route`."""
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
    """Chosen experts and their weights of a router's logits [T, E].

    A softmax over the chosen logits alone equals the normalised softmax over all of them, so it needs no score of its own.
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
    """Indices of the `count` largest of each row, largest first; of equal ones the first, NaN before all."""
    best = preference.topk(min(count + 1, preference.shape[1]), dim=-1)
    if bool((best.values[:, 1:] < best.values[:, :-1]).all()):
        return best.indices[:, :count].contiguous()
    # there are equal ones, whose order topk leaves open; a stable sort defines it, but takes three times as long on CPUs
    return preference.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _scores(logits: torch.Tensor, score: Score) -> torch.Tensor:
    """Scores [T, E] of logits."""
    match score:
        case "softmax":
            return logits.softmax(dim=-1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrt_softplus":
            return F.softplus(logits).sqrt()

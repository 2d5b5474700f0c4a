"""Routes in torch: the specification, and what computes where Triton does not.

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
    """See `op.route`."""
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
    """Choices and weights of a router's logits [T, E].

    A softmax over the chosen logits alone is the softmax over all of them, normalised: it needs no form of its own.
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
    """The largest of each row first; of equal ones the first, NaN before all."""
    best = preference.topk(min(count + 1, preference.shape[1]), dim=-1)
    if bool((best.values[:, 1:] < best.values[:, :-1]).all()):
        return best.indices[:, :count].contiguous()
    # equal ones, of whose order topk says nothing; a stable sort does, and takes three times as long on CPUs
    return preference.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _scores(logits: torch.Tensor, score: Score) -> torch.Tensor:
    match score:
        case "softmax":
            return logits.softmax(dim=-1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrt_softplus":
            return F.softplus(logits).sqrt()

"""The MoE router in torch: the specification of `route`, and its options."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]

TINY = 1e-20  # added to a sum of scores before it divides, since all scores may have been rounded to zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How many experts a token chooses, and their weights.

    A token chooses the experts with the largest logits or, if the layer has a learned correction, the largest score + correction;
    of equal ones the first. With several groups of experts, a token chooses from its `top_groups` best groups only. A group is as
    good as its best expert or, if the layer has a correction, as the sum of its two best ones. An expert's weight is its score
    times `scale`; with `normalise` a token's weights add up to `scale`.
    """

    num_chosen: int  # experts per token (top-k)
    score: Score = "softmax"
    normalise: bool = True
    scale: float = 1.0  # multiplies all weights
    num_groups: int = 1  # groups of equally many experts
    top_groups: int = 1


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
        chosen = _choice(preference, routing, best_of_group=1 if correction is None else 2)
    weights = scores.gather(1, chosen)
    if routing.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    weights = weights * routing.scale
    return chosen, weights if expert_scale is None else weights * expert_scale[chosen]


def _choice(preference: torch.Tensor, routing: Routing, *, best_of_group: int) -> torch.Tensor:
    """Return each token's experts [T, K]; a group is as good as the sum of its `best_of_group` largest preferences."""
    if routing.num_groups == 1:
        return _largest(preference, routing.num_chosen)
    of_group = preference.view(len(preference), routing.num_groups, preference.shape[1] // routing.num_groups)
    merits = of_group.topk(best_of_group, dim=-1).values.sum(dim=-1)
    groups = _largest(merits, routing.top_groups).sort(dim=-1).values
    members = torch.arange(of_group.shape[2], device=preference.device)
    candidates = (groups[..., None] * len(members) + members).flatten(1)
    return candidates.gather(1, _largest(preference.gather(1, candidates), routing.num_chosen))


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

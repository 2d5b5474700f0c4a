"""Measures how clearly the routers of a transformers model choose experts, and its indexers tokens.

A router takes the experts with the largest scores of each token. Two scores that differ by less than rounding are a *near tie*:
another order of additions, as another implementation or another processor has it, chooses the other expert, and everything after
it differs. An answer with a near tie can be compared with no other implementation, however clear its tokens are.

Example: scores 0.31, 0.24, 0.2399999 and two experts a token: the choice is ahead by 1e-7 of the largest score, 3.2e-7.
"""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MASKED = -1e38  # scores below it are of tokens that an indexer's query does not see


class ExpertChoices(TorchDispatchMode):
    """While active, measures every choice of the largest scores (`topk`); `margin` is the closest, infinite without any."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = math.inf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.topk.default:
            self.margin = min(self.margin, choice_margin(args[0], args[1]))
        return func(*args, **(kwargs or {}))


def choice_margin(scores: torch.Tensor, num_chosen: int) -> float:
    """How far the last chosen score of any row is ahead of the first not chosen, relative to the largest score of the row."""
    if num_chosen >= scores.shape[-1]:
        return math.inf
    scores = scores.double()
    scores = scores.masked_fill(scores < MASKED, -math.inf)
    ordered = scores.sort(dim=-1, descending=True).values
    ahead = ordered[..., num_chosen - 1] - ordered[..., num_chosen]
    largest = scores.masked_fill(scores.isinf(), 0.0).abs().amax(dim=-1)
    return float((ahead / largest).nan_to_num(math.inf, posinf=math.inf).amin())

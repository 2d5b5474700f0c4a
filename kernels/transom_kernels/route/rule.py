"""How an MoE router makes chosen experts and weights of its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]

TINY = 1e-20  # added to a sum of scores before it divides: all scores may have rounded to zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How many experts a token chooses, and their weights.

    A token chooses the experts with its largest logits, or with its largest scores plus a learned correction; of equal ones the
    first. An expert's weight is its score, which grows with its logit. `normalise` makes the weights of a token add up to `scale`.
    """

    num_chosen: int  # experts per token (top-k)
    score: Score = "softmax"
    normalise: bool = True
    scale: float = 1.0  # multiplies all weights

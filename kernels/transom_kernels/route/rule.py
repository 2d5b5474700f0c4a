"""The rule by which an MoE router turns logits into chosen experts and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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

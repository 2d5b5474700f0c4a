"""How a router's logits become choices and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]

TINY = 1e-20  # keeps a sum of scores that all rounded to zero from dividing by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How many experts a token chooses, and what they weigh.

    A token's experts are those of its largest logits, or of its largest scores plus a learned correction; of equal ones the first.
    A weight is the expert's score, which grows with its logit. `normalise` makes a token's weights add up to `scale`.
    """

    num_chosen: int
    score: Score = "softmax"
    normalise: bool = True
    scale: float = 1.0

"""Log-probabilities at one position, as objects."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of one token and its rank (1 = most likely) before temperature and filters."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the chosen token, and of the most likely tokens, the most likely first."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()

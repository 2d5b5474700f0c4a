"""What is replayed: requests whose contents are runs of consecutive token ids, so that millions of tokens cost little memory.

Two runs have equal contents where they start at the same token id; a shorter one is a prefix of a longer one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from transom_worker.contract import Request, SamplingParams


class Run(NamedTuple):
    """The token ids `first_token ... first_token + num_tokens - 1`."""

    first_token: int
    num_tokens: int

    def cut(self, num_tokens: int) -> Run:
        """Its first tokens."""
        return Run(self.first_token, min(self.num_tokens, num_tokens))


class TokenSpace:
    """Hands out runs that share no token id."""

    def __init__(self) -> None:
        self.num_taken = 0

    def take(self, num_tokens: int) -> Run:
        """A run that nobody else has."""
        run = Run(self.num_taken, num_tokens)
        self.num_taken += num_tokens
        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """One request: what is asked, what will be answered, and when it comes.

    It comes at `arrival_s` on the workload's clock, but not before request `after` has been answered (an index into the workload).
    """

    prompt: tuple[Run, ...]
    answer: Run
    turn_boundaries: tuple[int, ...] = ()
    arrival_s: float = 0.0
    after: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(run.num_tokens for run in self.prompt)

    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as a client would send it."""
        return tuple(chain.from_iterable(range(first, first + count) for first, count in self.prompt))

    def as_request(self, request_id: str, *, arrival_s: float) -> Request:
        """What the scheduler is given."""
        return Request(
            request_id=request_id,
            prompt_token_ids=self.prompt_token_ids(),
            params=SamplingParams(max_tokens=self.answer.num_tokens, ignore_eos=True),
            seed=0,
            turn_boundaries=self.turn_boundaries,
            arrival_s=arrival_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in the order in which they are served one at a time; a clock goes by their arrival."""

    name: str
    requests: tuple[SimulatedRequest, ...]

    def first(self, limit: int | None) -> Workload:
        """Its first `limit` requests; all of them if None."""
        return self if limit is None else Workload(name=self.name, requests=self.requests[:limit])

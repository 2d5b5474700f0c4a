"""`Workload`: the requests of a simulation.

Prompts and answers consist of *runs* of consecutive token ids. Only a run's first id and length are stored, so millions of tokens
take little memory. Two runs that start at the same token id have equal contents up to the length of the shorter one. Example:
`Run(512, 100)` has the token ids 512 to 611.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from transom_core.contract import Request, SamplingParams
from transom_core.errors import ConfigError


class Run(NamedTuple):
    """The token ids `first_token ... first_token + num_tokens - 1`."""

    first_token: int
    num_tokens: int

    def cut(self, num_tokens: int) -> Run:
        """Return the first tokens of the run, at most `num_tokens`."""
        return Run(self.first_token, min(self.num_tokens, num_tokens))


class TokenSpace:
    """Creates runs that share no token id: each begins where the previous one ended."""

    def __init__(self) -> None:
        self.num_taken = 0

    def take(self, num_tokens: int) -> Run:
        """Return a run of token ids that no other run has."""
        run = Run(self.num_taken, num_tokens)
        self.num_taken += num_tokens
        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """One request: its prompt, its answer and its arrival.

    The request arrives at `arrival_s` on the workload's clock, but not earlier than `pause_s` seconds after the answer to the
    request with index `after`, if there is one.
    """

    prompt: tuple[Run, ...]
    answer: Run
    turn_boundaries: tuple[int, ...] = ()
    arrival_s: float = 0.0
    after: int | None = None
    pause_s: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of prompt tokens."""
        return sum(run.num_tokens for run in self.prompt)

    def prompt_token_ids(self) -> tuple[int, ...]:
        """Return the prompt's token ids."""
        return tuple(chain.from_iterable(range(first, first + count) for first, count in self.prompt))

    def as_request(self, request_id: str, *, cache_salt: str | None = None) -> Request:
        """Return the request for the scheduler. Another salt gives its blocks other digests."""
        return Request(
            request_id=request_id,
            prompt_token_ids=self.prompt_token_ids(),
            params=SamplingParams(max_tokens=self.answer.num_tokens, ignore_eos=True),
            seed=0,
            turn_boundaries=self.turn_boundaries,
            cache_salt=cache_salt,
        )


def chained(turns: Iterable[tuple[int, SimulatedRequest]]) -> list[SimulatedRequest]:
    """Return the requests of (session, request) pairs in their order; each waits for the previous request of its session."""
    last: dict[int, int] = {}
    requests: list[SimulatedRequest] = []
    for session, request in turns:
        requests.append(replace(request, after=last.get(session)))
        last[session] = len(requests) - 1
    return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests, in the order in which `one_by_one` serves them."""

    name: str
    requests: tuple[SimulatedRequest, ...]

    def one_by_one(self) -> Workload:
        """Return a workload whose requests arrive one at a time, each when the one before it has ended, whatever was recorded."""
        requests = chained((0, replace(request, arrival_s=0.0, pause_s=0.0)) for request in self.requests)
        return Workload(name=self.name, requests=tuple(requests))

    def part(self, skip: int, limit: int | None) -> Workload:
        """Return a workload without the first `skip` requests, cut to `limit` requests (None: all).

        Raises:
            ConfigError: no request is left.
        """
        end = len(self.requests) if limit is None else skip + limit
        if skip >= len(self.requests):
            raise ConfigError(f"--skip {skip} leaves no request of {self.name}; give at most {len(self.requests) - 1}.")
        return Workload(name=self.name, requests=self.requests[skip:end])

"""Which worker takes a request: pure functions of what is known about each, with randomness passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import sqrt
from statistics import median
from typing import Literal, NamedTuple

from transom_worker.config import RoutingPolicy

# What a request costs its worker beyond its prompt, in prompt tokens: it takes part in every step until it ends, and its blocks
# push others out. Small enough that sessions stay where they are, large enough that not all of them begin where a system prompt is.
REQUEST_TOKENS = 200
# How long a request runs once it has begun, in decode steps; nobody knows how long answers will be.
ANSWER_STEPS = 256
# Rates of equal machines differ by up to this, with the prompts that they happened to get; no reason to prefer one.
EQUAL_RATES = 2.0
# While nothing was measured anywhere.
DEFAULT_PREFILL_TOKENS_PER_S = 5_000.0
DEFAULT_DECODE_STEP_S = 0.02
# Costs this much apart are as good as equal.
NEARLY = 0.1
# Over so many shares of its seats a worker's pressure bends from nothing to a straight line.
BEND = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One worker, as far as it matters for one request."""

    worker_id: str
    num_to_compute: int  # of the request's tokens, after hit and repair
    queue_tokens: int = 0  # to be computed before it
    num_requests: int = 0  # running and waiting
    max_num_seqs: int = 1
    used_share: float = 0.0  # of the KV pool, by running sequences
    prefill_tokens_per_s: float = 0.0  # 0: not measured
    decode_step_s: float = 0.0  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance:
    """What differs from choice to choice: `turn` counts them, `draw` is in [0, 1).

    `home` stands for the first tokens of the prompt that no worker has cached; empty if that is not known.
    """

    turn: int
    draw: float
    home: bytes = b""


Reason = Literal["only_one", "longest_hit", "least_loaded", "home", "random", "turn"]


class Choice(NamedTuple):
    """Who was chosen and why: no other could take the request; it has the longest hit, or the least to do; it is the prompt's home
    among workers that are nearly as good, or a lot fell on it among them; it was its turn."""

    candidate: Candidate
    reason: Reason


Choose = Callable[[Sequence[Candidate], Chance], Choice]


def choose(policy: RoutingPolicy, candidates: Sequence[Candidate], chance: Chance) -> Choice:
    """The policy's choice; there is none among one."""
    return Choice(candidates[0], "only_one") if len(candidates) == 1 else POLICIES[policy](candidates, chance)


def kv(candidates: Sequence[Candidate], chance: Chance) -> Choice:
    """Where the first token is expected soonest, and room is left; among those that are nearly as good, the prompt's home.

    So what was evicted everywhere comes back to where it was, by whatever router, and is not left in pieces on all workers.
    """
    rates = _prefill_rates(candidates)
    step_s = _typical([c.decode_step_s for c in candidates], DEFAULT_DECODE_STEP_S)
    costs = [expected_cost_s(c, rate, step_s) for c, rate in zip(candidates, rates, strict=True)]
    good = _up_to(min(costs) * (1 + NEARLY), candidates, costs)
    if len(good) == 1:
        least = min((other.num_to_compute for other in candidates if other is not good[0]), default=0)
        return Choice(good[0], "longest_hit" if good[0].num_to_compute < least else "least_loaded")
    if not chance.home:
        return Choice(good[int(chance.draw * len(good))], "random")
    home = max(good, key=lambda candidate: sha256(chance.home + candidate.worker_id.encode()).digest())
    return Choice(home, "home")


def least_tokens(candidates: Sequence[Candidate], chance: Chance) -> Choice:
    """Where the fewest tokens wait to be computed, then where the fewest requests are; by lot among equals."""
    queues = [candidate.queue_tokens + REQUEST_TOKENS * candidate.num_requests for candidate in candidates]
    shortest = _up_to(min(queues), candidates, queues)
    return Choice(shortest[int(chance.draw * len(shortest))], "random" if len(shortest) > 1 else "least_loaded")


def round_robin(candidates: Sequence[Candidate], chance: Chance) -> Choice:
    """Each in turn."""
    return Choice(candidates[chance.turn % len(candidates)], "turn")


def power_of_two(candidates: Sequence[Candidate], chance: Chance) -> Choice:
    """The one with fewer requests of two drawn by lot."""
    others = len(candidates) - 1
    if not others:
        return Choice(candidates[0], "only_one")
    at, second = divmod(int(chance.draw * len(candidates) * others), others)
    one, other = candidates[at], candidates[second + (second >= at)]
    if one.num_requests == other.num_requests:
        return Choice(one, "random")
    return Choice(one if one.num_requests < other.num_requests else other, "least_loaded")


POLICIES: dict[RoutingPolicy, Choose] = {
    "kv": kv,
    "least_tokens": least_tokens,
    "round_robin": round_robin,
    "power_of_two": power_of_two,
}
REASONS: dict[RoutingPolicy, tuple[Reason, ...]] = {
    "kv": ("only_one", "longest_hit", "least_loaded", "home", "random"),
    "least_tokens": ("only_one", "least_loaded", "random"),
    "round_robin": ("only_one", "turn"),
    "power_of_two": ("only_one", "least_loaded", "random"),
}
"""What each policy may say."""


def expected_cost_s(candidate: Candidate, prefill_tokens_per_s: float, decode_step_s: float) -> float:
    """Seconds until the first token, by tokens to compute before it, and what waiting for blocks and a seat would add."""
    num_tokens = candidate.num_to_compute + candidate.queue_tokens + REQUEST_TOKENS * candidate.num_requests
    return num_tokens / prefill_tokens_per_s + ANSWER_STEPS * decode_step_s * pressure(candidate)


def pressure(candidate: Candidate) -> float:
    """Which part of an answer's time a new request may have to wait for blocks (all of it in a full pool), and for a seat."""
    excess = (candidate.num_requests + 1) / candidate.max_num_seqs - 1
    seats = (excess + sqrt(excess * excess + BEND * BEND)) / 2
    return candidate.used_share**8 + seats


def _prefill_rates(candidates: Sequence[Candidate]) -> list[float]:
    """Each one's rate; the typical one where none is known, or where it is hardly another."""
    typical = _typical([c.prefill_tokens_per_s for c in candidates], DEFAULT_PREFILL_TOKENS_PER_S)
    rates = [c.prefill_tokens_per_s or typical for c in candidates]
    return [typical if 1 / EQUAL_RATES <= rate / typical <= EQUAL_RATES else rate for rate in rates]


def _typical(values: Sequence[float], default: float) -> float:
    return median([value for value in values if value] or [default])


def _up_to(limit: float, candidates: Sequence[Candidate], costs: Sequence[float]) -> list[Candidate]:
    return [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost <= limit]

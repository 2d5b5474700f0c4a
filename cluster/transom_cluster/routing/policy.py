"""The routing policies: which of several workers takes a request. Pure functions; the random numbers are passed in.

- **candidate**: one worker with what matters for this request: tokens to compute, queue, running slots, KV pool, and measured
  rates.
- **cost** (of the policy `kv`): expected seconds until the first token, plus the part of an answer's time that the request may
  have to wait for blocks or a running slot.
- **home**: the worker that the prompt's first uncached tokens hash to (rendezvous hashing): equal prompts have equal homes at all
  routers.

An example of `kv` with 5,000 prefill tokens per second and idle workers: a prompt has 3,000 tokens, worker a has 2,000 of them
cached, worker b has none. The costs are (1,000 + 0) / 5,000 = 0.2 s and 0.6 s, so a takes the request, with the reason
`longest_hit`. Were a to compute 2,500 queued tokens first, its cost would be 0.7 s, and b would take it, with the reason
`least_loaded`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import sqrt
from statistics import median
from typing import Literal, NamedTuple

from transom_worker.config import RoutingPolicy

# What a running request costs its worker beyond its prompt, in prompt tokens: it takes part in every step until it ends, and its
# blocks displace cached ones. The value is small enough that sessions stay where their prefix is, and large enough that not all
# sessions begin at the worker that has the system prompt.
REQUEST_TOKENS = 200
# The decode steps that a request is expected to run; the router cannot know the length of an answer.
ANSWER_STEPS = 256
# Measured rates of equal machines differ by up to this factor, since their prompts differ; smaller differences are ignored.
EQUAL_RATES = 2.0
# Used while no worker has measured its rate.
DEFAULT_PREFILL_TOKENS_PER_S = 5_000.0
DEFAULT_DECODE_STEP_S = 0.02
# Costs up to this share above the least cost count as equal.
NEARLY = 0.1
# The width of the bend in the pressure for running slots, as a share of `max_num_seqs`: from nothing to a straight line.
BEND = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One worker, with what matters for one request."""

    worker_id: str
    num_to_compute: int  # tokens of the request, without the hit and with the window repair
    queue_tokens: int = 0  # tokens that the worker computes before them
    num_requests: int = 0  # running and waiting
    max_num_seqs: int = 1
    used_share: float = 0.0  # of the KV pool, by running sequences
    prefill_tokens_per_s: float = 0.0  # 0: not measured
    decode_step_s: float = 0.0  # 0: not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class TieBreak:
    """What decides between candidates that are equally good.

    `turn` counts the placements, and `draw` is a random number in [0, 1). `home` is the digest of the first hash block of the
    prompt that no worker has cached; empty where the prompt has no hash block or the cache is off.
    """

    turn: int
    draw: float
    home: bytes = b""


Reason = Literal["only_one", "longest_hit", "least_loaded", "home", "random", "turn"]


class Choice(NamedTuple):
    """The chosen worker and the reason.

    only_one: no other worker may take the request; longest_hit: it has the longest hit; least_loaded: it has the least to do;
    home: it is the prompt's home among workers that are nearly as good; random: drawn at random among equals; turn: its turn in
    `round_robin`.
    """

    candidate: Candidate
    reason: Reason


Choose = Callable[[Sequence[Candidate], TieBreak], Choice]


def choose(policy: RoutingPolicy, candidates: Sequence[Candidate], tie_break: TieBreak) -> Choice:
    """The policy's choice; a single candidate is taken without asking the policy."""
    return Choice(candidates[0], "only_one") if len(candidates) == 1 else POLICIES[policy](candidates, tie_break)


def kv(candidates: Sequence[Candidate], tie_break: TieBreak) -> Choice:
    """The worker with the least cost; among those that are nearly as good, the prompt's home.

    The home brings a prefix that was evicted everywhere back to one worker, whatever router places it, instead of spreading it
    over all.
    """
    rates = _prefill_rates(candidates)
    step_s = _typical([c.decode_step_s for c in candidates], DEFAULT_DECODE_STEP_S)
    costs = [expected_cost_s(c, rate, step_s) for c, rate in zip(candidates, rates, strict=True)]
    good = _up_to(min(costs) * (1 + NEARLY), candidates, costs)
    if len(good) == 1:
        least = min((other.num_to_compute for other in candidates if other is not good[0]), default=0)
        return Choice(good[0], "longest_hit" if good[0].num_to_compute < least else "least_loaded")
    if not tie_break.home:
        return Choice(good[int(tie_break.draw * len(good))], "random")
    home = max(good, key=lambda candidate: sha256(tie_break.home + candidate.worker_id.encode()).digest())
    return Choice(home, "home")


def least_tokens(candidates: Sequence[Candidate], tie_break: TieBreak) -> Choice:
    """The worker with the fewest tokens to compute, where each of its requests counts `REQUEST_TOKENS`; at random among equals."""
    queues = [candidate.queue_tokens + REQUEST_TOKENS * candidate.num_requests for candidate in candidates]
    shortest = _up_to(min(queues), candidates, queues)
    reason: Reason = "random" if len(shortest) > 1 else "least_loaded"
    return Choice(shortest[int(tie_break.draw * len(shortest))], reason)


def round_robin(candidates: Sequence[Candidate], tie_break: TieBreak) -> Choice:
    """Each worker in turn."""
    return Choice(candidates[tie_break.turn % len(candidates)], "turn")


def power_of_two(candidates: Sequence[Candidate], tie_break: TieBreak) -> Choice:
    """Of two workers drawn at random the one with fewer requests."""
    num_others = len(candidates) - 1
    if not num_others:
        return Choice(candidates[0], "only_one")
    # One draw selects an ordered pair: `first` among all, `second` among the others.
    first, second = divmod(int(tie_break.draw * len(candidates) * num_others), num_others)
    if second >= first:
        second += 1
    one, other = candidates[first], candidates[second]
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
"""The reasons that each policy may give."""


def expected_cost_s(candidate: Candidate, prefill_tokens_per_s: float, decode_step_s: float) -> float:
    """Expected seconds until the first token, plus the expected wait for blocks and a running slot."""
    num_tokens = candidate.num_to_compute + candidate.queue_tokens + REQUEST_TOKENS * candidate.num_requests
    return num_tokens / prefill_tokens_per_s + ANSWER_STEPS * decode_step_s * pressure(candidate)


def pressure(candidate: Candidate) -> float:
    """The part of an answer's time that a new request may have to wait: for blocks (all of it in a full pool), and for a running
    slot."""
    excess = (candidate.num_requests + 1) / candidate.max_num_seqs - 1
    slots = (excess + sqrt(excess * excess + BEND * BEND)) / 2
    return candidate.used_share**8 + slots


def _prefill_rates(candidates: Sequence[Candidate]) -> list[float]:
    """Each candidate's rate; the median rate where it is not measured, or differs from the median by less than `EQUAL_RATES`."""
    typical = _typical([c.prefill_tokens_per_s for c in candidates], DEFAULT_PREFILL_TOKENS_PER_S)
    rates = [c.prefill_tokens_per_s or typical for c in candidates]
    return [typical if 1 / EQUAL_RATES <= rate / typical <= EQUAL_RATES else rate for rate in rates]


def _typical(values: Sequence[float], default: float) -> float:
    return median([value for value in values if value] or [default])


def _up_to(limit: float, candidates: Sequence[Candidate], costs: Sequence[float]) -> list[Candidate]:
    return [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost <= limit]

"""The routing policies: which of several workers takes a request. Pure functions; the random numbers are passed in.

- **candidate**: one worker with what matters for this request: tokens to compute, queue, running slots, KV pool, and measured
  rates. The policies see all candidates together, a column (array) for each fact, since there may be hundreds.
- **cost** (of the policy `kv`): expected seconds until the first token, plus the part of an answer's time that the request may
  have to wait for blocks or a running slot.
- **home**: the worker that the prompt's first uncached tokens hash to (rendezvous hashing): equal prompts have equal homes at all
  routers.
- **key**: the client's `prompt_cache_key`, a hint that requests with one key have a prefix in common. The **key's worker** is the
  one that took the last request with it.

An example of `kv` with 5,000 prefill tokens per second and idle workers: a prompt has 3,000 tokens, worker a has 2,000 of them
cached, worker b has none. The costs are (1,000 + 0) / 5,000 = 0.2 s and 0.6 s, so a takes the request, with the reason
`longest_hit`. Were a to compute 2,500 queued tokens first, its cost would be 0.7 s, and b would take it, with the reason
`least_loaded`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from math import sqrt
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from transom_core.config import RoutingPolicy

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
# How many tokens a request waits longer to be at its key's worker: about two other requests there. So a key gathers no crowd.
KEY_TOKENS = 512
# The width of the bend in the pressure for running slots, as a share of `max_num_seqs`: from nothing to a straight line.
BEND = 0.1
# More tokens than any request has.
MOST = 1 << 62


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
    fetch_bytes_per_s: float = 0.0  # 0: not measured

    @property
    def facts(self) -> tuple[float, ...]:
        """What the policies see of the worker, the same for all requests: a value for each of `FACTS`."""
        return (
            self.queue_tokens,
            self.num_requests,
            pressure(self),
            self.prefill_tokens_per_s,
            self.decode_step_s,
            self.fetch_bytes_per_s,
        )


FACTS = ("queue_tokens", "num_requests", "pressure", "prefill_tokens_per_s", "decode_step_s", "fetch_bytes_per_s")
"""The rows of `Candidates.facts`, in order; the units are those of `Candidate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """All workers that may take a request; every array has an item for each of them."""

    num_to_compute: npt.NDArray[np.int64]
    extra_s: npt.NDArray[np.float64]  # to load or fetch the cached prefix, before the other tokens can be computed
    facts: npt.NDArray[np.float64]  # [facts, workers]
    seeds: npt.NDArray[np.uint64]  # `worker_seed` of each

    def __len__(self) -> int:
        return len(self.num_to_compute)

    def at(self, positions: npt.NDArray[np.int64]) -> Candidates:
        """Some of the candidates."""
        return Candidates(
            num_to_compute=self.num_to_compute[positions],
            extra_s=self.extra_s[positions],
            facts=self.facts[:, positions],
            seeds=self.seeds[positions],
        )

    @property
    def computing_s(self) -> npt.NDArray[np.float64]:
        """For each worker the seconds to compute the request's tokens, its queue apart."""
        times_s: npt.NDArray[np.float64] = self.num_to_compute / prefill_rates(self.facts[3])
        return times_s


def worker_seed(worker_id: str) -> int:
    """A number of 64 bits for a worker, from its id, by which prompts find their homes. Equal at all routers."""
    return int.from_bytes(blake2b(worker_id.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class TieBreak:
    """What decides between candidates that are equally good.

    `turn` counts the placements, and `draw` is a random number in [0, 1). `home` is the digest of the first hash block of the
    prompt that no worker has cached, or that of the key; empty where the prompt has no hash block or the cache is off, and there is
    no key. `key_position` is the candidate that is the key's worker.
    """

    turn: int
    draw: float
    home: bytes = b""
    key_position: int | None = None


Reason = Literal["only_one", "longest_hit", "cache_key", "least_loaded", "home", "random", "turn"]


class Choice(NamedTuple):
    """The position of the chosen candidate and the reason.

    only_one: no other worker may take the request; longest_hit: it has the longest hit; cache_key: it is the key's worker, no other
    has a longer hit, and the request waits hardly longer there; least_loaded: it has the least to do;
    home: it is the prompt's home among workers that are nearly as good; random: drawn at random among equals; turn: its turn in
    `round_robin`.
    """

    position: int
    reason: Reason


Choose = Callable[[Candidates, TieBreak], Choice]


def choose(policy: RoutingPolicy, candidates: Candidates, tie_break: TieBreak) -> Choice:
    """The policy's choice; a single candidate is taken without asking the policy."""
    return Choice(0, "only_one") if len(candidates) == 1 else POLICIES[policy](candidates, tie_break)


def kv(candidates: Candidates, tie_break: TieBreak) -> Choice:
    """The worker with the least cost; among those that are nearly as good, the prompt's home.

    The home brings a prefix that was evicted everywhere back to one worker, from all routers, instead of spreading it
    over all. The key's worker is taken even at a somewhat higher cost, unless another one has a longer hit.
    """
    costs = expected_costs_s(candidates)
    key = tie_break.key_position
    if key is not None and _is_worth_its_key(candidates, costs, key):
        return Choice(key, "cache_key")
    good = np.flatnonzero(costs <= costs.min() * (1 + NEARLY))
    if len(good) == 1:
        best = int(good[0])
        to_compute = candidates.num_to_compute
        is_least = to_compute[best] < min(to_compute[:best].min(initial=MOST), to_compute[best + 1 :].min(initial=MOST))
        return Choice(best, "longest_hit" if is_least else "least_loaded")
    if not tie_break.home:
        return Choice(int(good[int(tie_break.draw * len(good))]), "random")
    home = int.from_bytes(tie_break.home[:8], "little")
    return Choice(int(good[np.argmax(_mixed(candidates.seeds[good] ^ np.uint64(home)))]), "home")


def least_tokens(candidates: Candidates, tie_break: TieBreak) -> Choice:
    """The worker with the fewest tokens to compute, where each of its requests counts `REQUEST_TOKENS`; the key's worker among
    equals, else one at random."""
    queue_tokens, num_requests, *_ = candidates.facts
    queues = queue_tokens + REQUEST_TOKENS * num_requests
    shortest = np.flatnonzero(queues == queues.min())
    key = tie_break.key_position
    if key is not None and key in shortest and len(shortest) > 1:
        return Choice(key, "cache_key")
    reason: Reason = "random" if len(shortest) > 1 else "least_loaded"
    return Choice(int(shortest[int(tie_break.draw * len(shortest))]), reason)


def round_robin(candidates: Candidates, tie_break: TieBreak) -> Choice:
    """Each worker in turn."""
    return Choice(tie_break.turn % len(candidates), "turn")


def power_of_two(candidates: Candidates, tie_break: TieBreak) -> Choice:
    """Of two workers drawn at random the one with fewer requests."""
    num_others = len(candidates) - 1
    if not num_others:
        return Choice(0, "only_one")
    # One draw selects an ordered pair: `first` among all, `second` among the others.
    first, second = divmod(int(tie_break.draw * len(candidates) * num_others), num_others)
    if second >= first:
        second += 1
    _, num_requests, *_ = candidates.facts
    if num_requests[first] == num_requests[second]:
        return Choice(first, "random")
    return Choice(first if num_requests[first] < num_requests[second] else second, "least_loaded")


POLICIES: dict[RoutingPolicy, Choose] = {
    "kv": kv,
    "least_tokens": least_tokens,
    "round_robin": round_robin,
    "power_of_two": power_of_two,
}
REASONS: dict[RoutingPolicy, tuple[Reason, ...]] = {
    "kv": ("only_one", "longest_hit", "cache_key", "least_loaded", "home", "random"),
    "least_tokens": ("only_one", "cache_key", "least_loaded", "random"),
    "round_robin": ("only_one", "turn"),
    "power_of_two": ("only_one", "least_loaded", "random"),
}
"""The reasons that each policy may give."""


def expected_costs_s(candidates: Candidates) -> npt.NDArray[np.float64]:
    """For each worker the expected seconds until the first token, plus the expected wait for blocks and a running slot.

    Loading a prefix from the host tier and fetching it from another worker count as much as they take.
    """
    queue_tokens, num_requests, pressures, rates, steps_s, _ = candidates.facts
    num_tokens = candidates.num_to_compute + queue_tokens + REQUEST_TOKENS * num_requests
    step_s = _typical(steps_s, DEFAULT_DECODE_STEP_S)
    costs_s: npt.NDArray[np.float64] = num_tokens / prefill_rates(rates) + ANSWER_STEPS * step_s * pressures
    return costs_s + candidates.extra_s


def pressure(candidate: Candidate) -> float:
    """The part of an answer's time that a new request may have to wait: for blocks (all of it in a full pool), and for a running
    slot."""
    excess = (candidate.num_requests + 1) / candidate.max_num_seqs - 1
    slots = (excess + sqrt(excess * excess + BEND * BEND)) / 2
    return candidate.used_share**8 + slots


def prefill_rates(rates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Each candidate's rate; the median rate where it is not measured, or differs from the median by less than `EQUAL_RATES`."""
    typical = _typical(rates, DEFAULT_PREFILL_TOKENS_PER_S)
    is_typical = (rates >= typical / EQUAL_RATES) & (rates <= typical * EQUAL_RATES) | (rates == 0)
    return np.where(is_typical, typical, rates)


def _typical(values: npt.NDArray[np.float64], default: float) -> float:
    """The median of the values that are measured."""
    measured = np.sort(values[values > 0])
    middle = len(measured) // 2
    return float(measured[middle] + measured[-1 - middle]) / 2 if len(measured) else default


def _is_worth_its_key(candidates: Candidates, costs: npt.NDArray[np.float64], key: int) -> bool:
    """Whether the key's worker costs at most KEY_TOKENS more than the best, and no worker has a longer hit."""
    if candidates.num_to_compute[key] > candidates.num_to_compute.min():
        return False
    key_s = KEY_TOKENS / prefill_rates(candidates.facts[3])[key]
    return bool(costs[key] <= costs.min() * (1 + NEARLY) + key_s)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Other numbers for numbers of 64 bits, in which every bit depends on every bit (the end of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

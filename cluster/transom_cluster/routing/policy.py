"""The routing policies: each chooses the worker that takes a request. Pure functions; the caller passes in the random numbers.

- **candidate**: one worker with the facts that matter for this request: tokens to compute, queue, running slots, KV pool, and
  measured rates. The policies get all candidates together, as one array for each fact, since there may be hundreds.
- **cost** (of the policy `kv`): the expected seconds until the first token, plus the expected seconds of waiting for KV blocks or a
  running slot (`pressure`, which is a share of an answer's time, times the time of one answer).
- **home**: the worker that the prompt's first uncached tokens hash to (rendezvous hashing): equal prompts have equal homes at all
  routers.

An example of `kv` with 5,000 prefill tokens per second and idle workers: a prompt has 3,000 tokens, worker a has 2,000 of them
cached, worker b has none. The costs are (1,000 + 0) / 5,000 = 0.2 s and 0.6 s, so a takes the request, with the reason
`longest_hit`. If a had to compute 2,500 queued tokens first, its cost would be 0.7 s, and b would take the request, with the reason
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

# What a running request costs its worker besides its prompt, in prompt tokens: it takes part in every step until it ends, and its
# blocks displace cached ones. The value is so small that sessions stay where their prefix is, and so large that not all sessions
# begin at the worker that has the system prompt.
REQUEST_TOKENS = 200
# The decode steps that a request is expected to run; the router cannot know the length of an answer.
ANSWER_STEPS = 256
# Measured rates of equal machines differ by up to this factor, since their prompts differ; smaller differences are ignored.
EQUAL_RATES = 2.0
# Used while no worker has measured its rate.
DEFAULT_PREFILL_TOKENS_PER_S = 5_000.0
DEFAULT_DECODE_STEP_S = 0.02
# Costs of up to this share above the least cost count as equal.
NEARLY = 0.1
# How gradually the pressure for running slots (`pressure`) bends from zero to a straight line, as a share of `max_num_seqs`.
BEND = 0.1
# More tokens than any request has.
MOST = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One worker, with the facts that matter for one request."""

    worker_id: str
    num_to_compute: int  # tokens of the request, without the hit and with the window repair
    queue_tokens: int = 0  # tokens that the worker computes before those of the request
    num_requests: int = 0  # running and waiting
    max_num_seqs: int = 1
    used_share: float = 0.0  # share of the KV pool that running sequences use
    prefill_tokens_per_s: float = 0.0  # 0: not measured
    decode_step_s: float = 0.0  # 0: not measured

    @property
    def facts(self) -> tuple[float, ...]:
        """Return the facts about the worker that are the same for all requests: a value for each of `FACTS`."""
        return (self.queue_tokens, self.num_requests, pressure(self), self.prefill_tokens_per_s, self.decode_step_s)


FACTS = ("queue_tokens", "num_requests", "pressure", "prefill_tokens_per_s", "decode_step_s")
"""The rows of `Candidates.facts`, in order; the units are those of `Candidate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """All workers that may take a request; every array has an item for each of them."""

    num_to_compute: npt.NDArray[np.int64]
    extra_s: npt.NDArray[np.float64]  # seconds to load or fetch the cached prefix, before the other tokens are computed
    facts: npt.NDArray[np.float64]  # [facts, workers]
    seeds: npt.NDArray[np.uint64]  # `worker_seed` of each

    def __len__(self) -> int:
        return len(self.num_to_compute)

    def at(self, positions: npt.NDArray[np.int64]) -> Candidates:
        """Return the candidates at these positions."""
        return Candidates(
            num_to_compute=self.num_to_compute[positions],
            extra_s=self.extra_s[positions],
            facts=self.facts[:, positions],
            seeds=self.seeds[positions],
        )

    @property
    def num_requests(self) -> npt.NDArray[np.float64]:
        """For each worker, its requests, running and waiting."""
        counts: npt.NDArray[np.float64] = self.facts[1]
        return counts

    @property
    def queue_s(self) -> npt.NDArray[np.float64]:
        """For each worker, the seconds to compute what it computes before the request."""
        times_s: npt.NDArray[np.float64] = self.facts[0] / prefill_rates(self.facts[3])
        return times_s

    @property
    def computing_s(self) -> npt.NDArray[np.float64]:
        """For each worker, the seconds to compute the request's tokens, without the worker's queue."""
        times_s: npt.NDArray[np.float64] = self.num_to_compute / prefill_rates(self.facts[3])
        return times_s


def worker_seed(worker_id: str) -> int:
    """Return the 64-bit number of a worker, by which prompts find their homes. All routers get it from the id alone."""
    return int.from_bytes(blake2b(worker_id.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class TieBreak:
    """The values that decide between equally good candidates.

    `turn` counts the placements, and `draw` is a random number in [0, 1). `home` is the digest of the prompt's first hash block
    that no worker has cached; empty if the prompt has no hash block, or the cache is off.
    """

    turn: int
    draw: float
    home: bytes = b""


Reason = Literal["only_one", "longest_hit", "least_loaded", "home", "random", "turn"]


class Choice(NamedTuple):
    """The position of the chosen candidate and the reason.

    only_one: no other worker may take the request; longest_hit: it has the longest hit; least_loaded: it has the least work; home:
    it is the prompt's home among workers that are nearly as good; random: drawn at random among equals; turn: its turn in
    `round_robin`.
    """

    position: int
    reason: Reason


Choose = Callable[[Candidates, TieBreak], Choice]


def choose(policy: RoutingPolicy, candidates: Candidates, tie_break: TieBreak) -> Choice:
    """Return the policy's choice. A single candidate is taken without asking the policy."""
    return Choice(0, "only_one") if len(candidates) == 1 else POLICIES[policy](candidates, tie_break)


def kv(candidates: Candidates, tie_break: TieBreak) -> Choice:
    """Choose the worker with the least cost or, among several that are nearly as good, the prompt's home.

    If a prefix was evicted everywhere, all routers send its next prompts to one home, instead of spreading them over all workers.
    """
    costs = expected_costs_s(candidates)
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


def round_robin(candidates: Candidates, tie_break: TieBreak) -> Choice:
    """Choose each worker in turn."""
    return Choice(tie_break.turn % len(candidates), "turn")


POLICIES: dict[RoutingPolicy, Choose] = {"kv": kv, "round_robin": round_robin}
REASONS: dict[RoutingPolicy, tuple[Reason, ...]] = {
    "kv": ("only_one", "longest_hit", "least_loaded", "home", "random"),
    "round_robin": ("only_one", "turn"),
}
"""The reasons that each policy may give."""


def expected_costs_s(candidates: Candidates) -> npt.NDArray[np.float64]:
    """Return for each worker the expected seconds until the first token, plus the expected wait for blocks and a running slot.

    The time to load a prefix from another tier, or to fetch it from another worker, is added (`extra_s`).
    """
    queue_tokens, num_requests, pressures, rates, steps_s = candidates.facts
    num_tokens = candidates.num_to_compute + queue_tokens + REQUEST_TOKENS * num_requests
    step_s = _typical(steps_s, DEFAULT_DECODE_STEP_S)
    costs_s: npt.NDArray[np.float64] = num_tokens / prefill_rates(rates) + ANSWER_STEPS * step_s * pressures
    return costs_s + candidates.extra_s


def pressure(candidate: Candidate) -> float:
    """Return how long a new request is expected to wait for blocks and for a running slot, as a part of the time of one answer.

    - Blocks: `used_share**8` is close to 0 until the KV pool is nearly full, and 1 (a whole answer's time) in a full pool.
    - Slots: `excess` is the requests over `max_num_seqs`, as a share of it. The formula is a smooth `max(0, excess)`.
    """
    excess = (candidate.num_requests + 1) / candidate.max_num_seqs - 1
    slots = (excess + sqrt(excess * excess + BEND * BEND)) / 2
    return candidate.used_share**8 + slots


def prefill_rates(rates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return each candidate's rate; the median if its own is not measured, or within a factor of `EQUAL_RATES` of the median."""
    typical = _typical(rates, DEFAULT_PREFILL_TOKENS_PER_S)
    is_typical = (rates >= typical / EQUAL_RATES) & (rates <= typical * EQUAL_RATES) | (rates == 0)
    return np.where(is_typical, typical, rates)


def _typical(values: npt.NDArray[np.float64], default: float) -> float:
    """Return the median of the measured values, which are above 0, or `default` if there are none."""
    measured = np.sort(values[values > 0])
    middle = len(measured) // 2
    return float(measured[middle] + measured[-1 - middle]) / 2 if len(measured) else default


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix 64-bit numbers, so that every bit of a result depends on every bit of its number (SplitMix64's finaliser)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

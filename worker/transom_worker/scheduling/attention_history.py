"""`AttentionHistory`: how much attention each block of a sequence gets, and which blocks its KV policy keeps for that.

Terms:

    sink blocks   a sequence's first blocks, which every policy keeps; the others are its run
    mass          the attention of queries on a block's keys, averaged over layers and heads: a query's masses add up to 1
    decision      the choice of the blocks that stay, at a *decision point*; between two points (an *interval*) no block leaves
    oldest block  the first block of the run: the far edge of an adaptive window

Decision points are fixed positions: in the prompt every `_interval_blocks`, after it every block. A row of a step never
crosses one, and a decision waits for the results of all rows below it. So what a sequence keeps follows from its tokens alone,
however they were cut into steps: a sequence that is computed again, after a preemption or on another worker, keeps the same
blocks (up to the rounding of masses).

Example, blocks of 16 tokens, a budget of 512 tokens, a prompt of 1,000: decision points at 128, 256 ... 896, then at 1,008,
1,024 ... At 512 the next interval has 128 tokens, so 384 stay; at 1,024 it has 16, so 496 stay. The sequence never holds more
than 512 tokens.

**adaptive**: at a decision the window loses its oldest block while the block's share of the interval's attention is under the
threshold, but at most one block more than the interval has added, and never below the least window. So it grows or shrinks by
one block for each that is added; above the largest window it loses its oldest blocks in any case.

**heavy**: of the blocks that the budget allows, half are the most recent ones, as in H2O (Zhang et al., 2023); the others are
those with most mass so far, where mass loses half of its weight in `HALF_LIFE_TOKENS` tokens, so that blocks that were once
important make room.
"""

from __future__ import annotations

from collections.abc import Sequence

from transom_core.contract import AdaptivePolicy, HeavyPolicy
from transom_worker.kvcache.policy_retentions import max_blocks

HALF_LIFE_TOKENS = 512
MAX_INTERVAL_TOKENS = 512
INTERVALS_PER_BUDGET = 4  # an interval of the prompt takes this part of what the policy may keep


class AttentionHistory:
    """One sequence's masses and decisions. `num_prompt_tokens` is where decision points become dense."""

    def __init__(self, policy: AdaptivePolicy | HeavyPolicy, *, block_size: int, num_prompt_tokens: int) -> None:
        self._policy = policy
        self._block_size = block_size
        self._num_prompt_tokens = num_prompt_tokens
        self._num_sink_blocks = -(-policy.sinks // block_size)
        self._max_blocks = max_blocks(policy, block_size)
        self._interval_tokens = interval_blocks(policy, block_size) * block_size
        self._last_decision = 0
        self.next_decision = self._point_after(0)
        self.mass: dict[int, float] = {}  # by logical block, of the intervals before this one, decayed
        self.interval_mass: dict[int, float] = {}  # by logical block

    def add(self, logicals: Sequence[int], masses: Sequence[float]) -> None:
        """Add a row's masses: one for each of its first blocks, by logical index."""
        mass = self.interval_mass
        for logical, amount in zip(logicals, masses, strict=False):
            mass[logical] = mass.get(logical, 0.0) + amount

    def decide(self, run: Sequence[int]) -> list[int]:
        """Take the decision at `next_decision`: return which logical blocks of the run leave, ascending. All rows below it have
        answered.
        """
        position, interval = self.next_decision, self.next_decision - self._last_decision
        self._last_decision, self.next_decision = position, self._point_after(position)
        num_next = -(-(self.next_decision - position) // self._block_size)
        num_allowed = self._max_blocks - self._num_sink_blocks - num_next
        match self._policy:
            case AdaptivePolicy():
                leaving = self._outside_window(self._policy, run, num_allowed, interval)
            case HeavyPolicy():
                leaving = self._light_blocks(run, num_allowed, interval)
        self.interval_mass = {}
        for logical in leaving:
            self.mass.pop(logical, None)
        return leaving

    def _outside_window(
        self, policy: AdaptivePolicy, run: Sequence[int], num_allowed: int, num_queries: int
    ) -> list[int]:
        """Return the oldest blocks, as many as leave the window."""
        num_least = min(num_allowed, max(1, -(-(policy.min_window - 1) // self._block_size)))
        num_added = -(-num_queries // self._block_size)
        most = min(len(run) - num_least, num_added + 1)
        num_leaving = 0
        while num_leaving < most and self.interval_mass.get(run[num_leaving], 0.0) < policy.threshold * num_queries:
            num_leaving += 1
        return list(run[: max(num_leaving, len(run) - num_allowed, 0)])

    def _light_blocks(self, run: Sequence[int], num_allowed: int, num_queries: int) -> list[int]:
        """Return the blocks that are neither recent nor among those with most mass. Of equal ones the later stay."""
        decay = 0.5 ** (num_queries / HALF_LIFE_TOKENS)
        self.mass = {
            logical: decay * self.mass.get(logical, 0.0) + self.interval_mass.get(logical, 0.0) for logical in run
        }
        num_recent = -(-num_allowed // 2)
        older = run[: max(0, len(run) - num_recent)]
        num_leaving = max(0, len(run) - num_allowed)
        return sorted(sorted(older, key=lambda logical: (self.mass[logical], logical))[:num_leaving])

    def _point_after(self, position: int) -> int:
        """Return the first decision point after a position."""
        point = (position // self._interval_tokens + 1) * self._interval_tokens
        if point <= self._num_prompt_tokens:
            return point
        return (max(position, self._num_prompt_tokens) // self._block_size + 1) * self._block_size


def interval_blocks(policy: AdaptivePolicy | HeavyPolicy, block_size: int) -> int:
    """Return the blocks between two decision points in the prompt."""
    num_run_blocks = max_blocks(policy, block_size) - -(-policy.sinks // block_size)
    return max(1, min(num_run_blocks // INTERVALS_PER_BUDGET, MAX_INTERVAL_TOKENS // block_size))

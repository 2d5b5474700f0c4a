"""`AttentionHistory`: how much attention each block of a sequence gets, and which blocks its KV policy keeps for that reason.

    history = AttentionHistory(policy, ...)    # when the sequence is admitted
    history.add(logicals, masses)              # for the result of each of its rows
    leaving = history.decide(run)              # when `next_decision` tokens are computed: blocks to remove

Terms:

    KV policy     a request's own rule for which keys and values its full-attention layers keep: here "adaptive" or "heavy"
    sink blocks   a sequence's first blocks, which every policy keeps; the others are its run
    mass          the attention of queries on a block's keys, averaged over layers and heads: a query's masses add up to 1
    decision      the choice of the blocks that stay, at a *decision point*; between two points (an *interval*) no block leaves
    oldest block  the first block of the run: the far edge of an adaptive window

Decision points are fixed positions: in the prompt every `interval_blocks` blocks, after it every block. A row of a step never
crosses a decision point, and a decision waits for the results of all rows before it. So what a sequence keeps follows from its
tokens alone, however they were divided into steps: a sequence that is computed again, after a preemption or on another worker,
keeps the same blocks (up to the rounding of masses).

Example with blocks of 16 tokens, no sinks, a budget of 512 tokens and a prompt of 1,000: decision points are at 128, 256 ... 896,
then at 1,008, 1,024 ... At 512 the next interval has 128 tokens, so 384 stay; at 1,024 it has 16, so 496 stay. The sequence never
holds more than 512 tokens.

**adaptive**: at a decision the window loses its oldest block, and then the next one, for as long as that block's share of the
interval's attention is under the threshold. It loses at most one block more than the interval has added, and it keeps the least
window. So in an interval of one block it grows or shrinks by one block at most. Above the largest window it loses its oldest blocks
in any case.

**heavy**: of the blocks that the budget allows, half are the most recent ones, as in H2O (Zhang et al., 2023); the others are
those with the most mass so far. Mass loses half of its weight in `HALF_LIFE_TOKENS` tokens, so that blocks that were important once
make room for others.
"""

from collections.abc import Sequence

from transom_core.contract import AdaptivePolicy, HeavyPolicy
from transom_worker.kvcache.policy_retentions import max_blocks

HALF_LIFE_TOKENS = 512
MAX_INTERVAL_TOKENS = 512
INTERVALS_PER_BUDGET = 4  # an interval of the prompt has 1/4 of the tokens that the policy may keep


class AttentionHistory:
    """One sequence's masses and decisions. After `num_prompt_tokens` every block has a decision point."""

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
        """Add a row's masses, summed over its queries: `masses[i]` is that of logical block `logicals[i]`.

        `logicals` may list more blocks than the row's table had.
        """
        mass = self.interval_mass
        for logical, amount in zip(logicals, masses, strict=False):
            mass[logical] = mass.get(logical, 0.0) + amount

    def decide(self, run: Sequence[int]) -> list[int]:
        """Take the decision at `next_decision`: return which logical blocks of the run leave, in ascending order.

        All rows before that position must have answered.
        """
        position, interval = self.next_decision, self.next_decision - self._last_decision
        self._last_decision, self.next_decision = position, self._point_after(position)
        num_next = -(-(self.next_decision - position) // self._block_size)
        # The blocks of the next interval are added before the next decision, so there must be room for them.
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
        """Return the oldest blocks of the run: those that leave the adaptive window."""
        # The window includes a query's own token, whose block is not in the run yet: `min_window - 1` tokens must stay.
        num_least = min(num_allowed, max(1, -(-(policy.min_window - 1) // self._block_size)))
        num_added = -(-num_queries // self._block_size)
        most = min(len(run) - num_least, num_added + 1)
        num_leaving = 0
        while num_leaving < most and self.interval_mass.get(run[num_leaving], 0.0) < policy.threshold * num_queries:
            num_leaving += 1
        return list(run[: max(num_leaving, len(run) - num_allowed, 0)])

    def _light_blocks(self, run: Sequence[int], num_allowed: int, num_queries: int) -> list[int]:
        """Return the blocks that are neither recent nor among those with the most mass. Of equal masses the later blocks stay."""
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
    """Return how many blocks lie between two decision points in the prompt."""
    num_run_blocks = max_blocks(policy, block_size) - -(-policy.sinks // block_size)
    return max(1, min(num_run_blocks // INTERVALS_PER_BUDGET, MAX_INTERVAL_TOKENS // block_size))

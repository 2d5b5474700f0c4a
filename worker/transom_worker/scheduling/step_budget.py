"""`StepBudget`: how much one step may still compute, in tokens and in blocks of sliding windows. `StepTokenLimit` makes steps
smaller for a while after one that ran out of memory.

Terms:

    chunk         the tokens of one sequence in a step, when a long prompt is computed over several steps
    in flight     computed by a step whose result has not arrived; blocks that such tokens read are not freed
    extra blocks  the window blocks that a sequence holds, while a chunk is in flight, beyond those that it may hold at any time

For models whose layers all keep every token, the token budget (`max_num_batched_tokens`) is enough. A sliding window of `W` tokens
needs a second budget: while a step with `t` tokens of a sequence is in flight, nothing slides out, so the sequence holds
`W - 1 + t` tokens. `n` tokens touch at most `ceil((n - 1) / block) + 1` blocks, if they begin with the last token of a block. With
n = W - 1 + t that is at most `ceil(W / block) + 1` blocks, which the sequence may hold at any time, and `ceil((t - 2) / block)`
extra blocks.

Example: W = 128, blocks of 16 tokens, a chunk of 50 tokens: 9 blocks, and 3 extra ones until the step's result arrives.

A step may take up to `ceil(max_num_batched_tokens / block)` extra blocks, which its sequences share; a chunk that would take more
is made shorter. In addition, the window blocks of one chunk take at most 1/16 of the pool (`chunk_limit`): without this bound, one
long prompt could evict many cached prefixes for blocks that it needs only until the step's result arrives.
"""

from collections.abc import Iterable
from typing import NamedTuple

from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import StepPlan

CHUNKS_PER_POOL = 16  # the window blocks of one chunk take at most 1/16 of the pool


def chunk_limit(layout: ArenaLayout, block_size: int) -> int | None:
    """Return the most tokens of one sequence in a step; None if no group slides by tokens, since a chunk then takes only blocks
    that stay, and perhaps a snapshot."""
    sliding = [
        group.stride_bytes for group in layout.groups if not (group.spec.keeps_everything or group.spec.is_state)
    ]
    if not sliding:
        return None
    return max(1, layout.pool_bytes // CHUNKS_PER_POOL // sum(sliding)) * block_size


class StepBudget:
    """The rest of one step's budget: `take` subtracts what a sequence gets, and `fit` and `for_new` say how much is left for one.

    `num_tokens` is the token budget. `max_chunk` is the most tokens of one sequence; None means that no group slides, so that
    tokens are the only bound.
    """

    def __init__(self, num_tokens: int, *, block_size: int, max_chunk: int | None) -> None:
        self.num_tokens = num_tokens
        self._block_size = block_size
        # If no group slides, there are as many extra blocks as tokens, which is never the tighter bound.
        self._max_chunk = num_tokens if max_chunk is None else max_chunk
        self._num_extra_blocks = num_tokens if max_chunk is None else -(-num_tokens // block_size)

    @property
    def for_new(self) -> int:
        """Tokens that a newly admitted sequence may start with; 0 if the step is full.

        `block * n + 2` tokens are the most that take `n` extra blocks. Without extra blocks no sequence is admitted, even though
        two tokens would fit.
        """
        return (
            min(self.num_tokens, self._max_chunk, self._num_extra_blocks * self._block_size + 2)
            if self._num_extra_blocks
            else 0
        )

    def fit(self, sequence: Sequence, count: int) -> int:
        """Return how many of a running sequence's next `count` tokens the budget allows."""
        in_flight = _in_flight(sequence)
        # The largest count with extra(in_flight + count) - extra(in_flight) <= the extra blocks that are left. Tokens in flight are
        # included, because the new tokens may fill the rest of their last block.
        most = (self._num_extra_blocks + self._extra(in_flight)) * self._block_size + 2 - in_flight
        return max(0, min(count, self.num_tokens, self._max_chunk, self._num_extra_blocks * self._block_size + 2, most))

    def take(self, sequence: Sequence, count: int) -> None:
        """Subtract `count` tokens of a sequence, and the extra blocks that they take."""
        self.num_tokens -= count
        in_flight = _in_flight(sequence)
        # At least the extra blocks of the new tokens alone, which remain when the step before has answered.
        self._num_extra_blocks -= max(self._extra(in_flight + count) - self._extra(in_flight), self._extra(count))

    def _extra(self, num_tokens: int) -> int:
        """Return the most extra blocks of `num_tokens` tokens in flight, wherever they begin inside a block."""
        return -(-max(0, num_tokens - 2) // self._block_size)


def _in_flight(sequence: Sequence) -> int:
    """Return how many tokens of the sequence are in flight."""
    assert sequence.blocks is not None
    return sequence.scheduled - sequence.blocks.processed


STEPS_BEFORE_GROWTH = 16


class LargestRow(NamedTuple):
    """The row of a step that asked for the most memory.

    A step needs more memory the more tokens it has, the more positions need logits, and the more tokens its queries attend to.
    """

    sequence: Sequence
    num_tokens: int  # that the row computes
    num_logit_rows: int  # positions whose logits it needs
    num_attended: int  # tokens that its last query attends to, itself included


def largest_row(plan: StepPlan, rows: Iterable[Sequence]) -> LargestRow:
    """Return the row of a plan with the most tokens and logits together; of equal rows the one with the longest context, then the
    last."""
    columns = zip(rows, plan.start, plan.count, plan.logits_from, strict=True)
    found = [
        LargestRow(sequence, count, max(0, start + count - logits_from), start + count)
        for sequence, start, count, logits_from in columns
    ]
    # `max` returns the first of equal rows, hence the reversed order.
    return max(reversed(found), key=lambda row: (row.num_tokens + row.num_logit_rows, row.num_attended))


class StepTokenLimit:
    """The most tokens of a step: `max_tokens`, and fewer for a while after a step that ran out of memory.

    At start the memory of the largest step is measured and kept free (`execution.setup.dummy_run`). So a step runs out of memory
    only if another process takes memory of the device, or if the measurement missed something. Then the limit is half of the step
    that failed, and it doubles after every `STEPS_BEFORE_GROWTH` steps with a result. Example with `max_tokens` of 2,048 and a
    failed step of 1,500 tokens: 750 tokens for 16 steps, 1,500 for 16 steps, then 2,048.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.num_tokens = max_tokens
        self._num_steps = 0  # with a result, since the limit changed

    def ran_out_of_memory(self, num_tokens: int) -> None:
        """Halve the limit, or the size of the step of `num_tokens` tokens that ran out of memory if that is smaller."""
        self.num_tokens, self._num_steps = max(1, min(num_tokens, self.num_tokens) // 2), 0

    def stepped(self) -> None:
        """Note that a step has a result; after `STEPS_BEFORE_GROWTH` of them a lowered limit doubles."""
        if self.num_tokens == self._max_tokens:
            return
        self._num_steps += 1
        if self._num_steps == STEPS_BEFORE_GROWTH:
            self.num_tokens, self._num_steps = min(self._max_tokens, 2 * self.num_tokens), 0

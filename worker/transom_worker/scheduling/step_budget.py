"""What one step may still compute: tokens, and window blocks beyond those that a sequence always holds.

Between two results a window of `W` tokens with `t` tokens in flight spans `W - 1 + t` tokens: at most `ceil(W / block) + 1` blocks
and `ceil((t - 2) / block)` more. The latter are counted here, once for the whole engine: at most `ceil(max_num_batched_tokens /
block)` for each step in flight, whatever number of sequences shares it. A chunk shrinks where there would be more. Nor does one
chunk's window take more than a share of the pool, lest a single prompt push checkpoints out for the length of a step.
"""

from __future__ import annotations

from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.scheduling.sequence import Sequence

POOL_SHARE = 16  # a chunk's window blocks take at most this part of the pool


def longest_chunk(layout: ArenaLayout, block_size: int) -> int | None:
    """Most tokens of one sequence in a step; None: no group slides, so that a chunk takes nothing that it does not keep."""
    sliding = [group.stride_bytes for group in layout.groups if not group.spec.keeps_everything]
    if not sliding:
        return None
    return max(1, layout.pool_bytes // POOL_SHARE // sum(sliding)) * block_size


class StepBudget:
    """One step's budget, `longest` tokens for each sequence. Groups that keep everything need no bound besides: `longest` None."""

    def __init__(self, num_tokens: int, *, block_size: int, longest: int | None) -> None:
        self.num_tokens = num_tokens
        self._block_size = block_size
        self._longest = num_tokens if longest is None else longest
        self._num_blocks = num_tokens if longest is None else -(-num_tokens // block_size)

    @property
    def for_new(self) -> int:
        """Tokens that a sequence with nothing in flight may start with; 0 if the step is full."""
        return min(self.num_tokens, self._longest, self._num_blocks * self._block_size + 2) if self._num_blocks else 0

    def fit(self, sequence: Sequence, count: int) -> int:
        """As many of a running sequence's next `count` tokens as the step has room for."""
        in_flight = _in_flight(sequence)
        most = (self._num_blocks + self._extra(in_flight)) * self._block_size + 2 - in_flight
        return max(0, min(count, self.num_tokens, self._longest, self._num_blocks * self._block_size + 2, most))

    def take(self, sequence: Sequence, count: int) -> None:
        """These tokens will be computed."""
        self.num_tokens -= count
        in_flight = _in_flight(sequence)
        # at least what they hold once the step before has answered
        self._num_blocks -= max(self._extra(in_flight + count) - self._extra(in_flight), self._extra(count))

    def _extra(self, num_tokens: int) -> int:
        """Blocks that so many tokens in flight may hold beyond `ceil(W / block) + 1`, however they lie."""
        return -(-max(0, num_tokens - 2) // self._block_size)


def _in_flight(sequence: Sequence) -> int:
    assert sequence.blocks is not None
    return sequence.scheduled - sequence.blocks.processed

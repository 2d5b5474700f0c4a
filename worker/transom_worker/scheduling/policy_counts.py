"""`PolicyCounts`: counts for the metrics what KV policies keep and drop, and how they change outputs, by type of policy.

A *KV policy* is a request's own rule for what its full-attention layers keep: a window, an adaptive window or a heavy budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from transom_core.contract import Request
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import PolicyQuality

POLICY_TYPES = ("window", "adaptive", "heavy")


@dataclass(slots=True, kw_only=True)
class PolicyStats:
    """The counts of one type of policy. The last four are of the requests that run now; the others count since start.

    `kl`, `num_agreeing` and `dropped_mass` (see `step.PolicyQuality`) are sums over the `num_compared` tokens that were compared
    with full attention.
    """

    num_requests: int = 0
    num_dropped_blocks: int = 0
    num_compared: int = 0
    kl: float = 0.0
    num_agreeing: int = 0
    dropped_mass: float = 0.0
    num_running: int = 0
    seen_tokens: int = 0  # tokens that were computed or found in the prefix cache
    kept_tokens: int = 0  # tokens for which the blocks of these requests have room
    window_tokens: int = 0  # `kept_tokens` without those of sink blocks


class PolicyCounts:
    """Counts of one scheduler. Only the engine's thread calls it."""

    def __init__(self) -> None:
        # By type, since start. Dropped blocks are added when their sequence leaves the device; `stats` adds those of running ones.
        self._counted = {name: PolicyStats() for name in POLICY_TYPES}

    def queued(self, request: Request) -> None:
        """Count a request that the scheduler has queued."""
        if request.kv_policy is not None:
            self._counted[request.kv_policy.type].num_requests += 1

    def compared(self, request: Request, quality: PolicyQuality) -> None:
        """Add a step's comparison with full attention for one token of a request."""
        assert request.kv_policy is not None
        counted = self._counted[request.kv_policy.type]
        counted.num_compared += 1
        counted.num_agreeing += quality.top_token_agrees
        counted.kl += quality.kl
        counted.dropped_mass += quality.dropped_mass

    def left(self, request: Request, blocks: SequenceBlocks) -> None:
        """Add the dropped blocks of a sequence whose blocks leave the device."""
        if request.kv_policy is not None:
            self._counted[request.kv_policy.type].num_dropped_blocks += blocks.num_dropped
            blocks.num_dropped = 0

    def stats(self, running: Iterable[Sequence], *, block_size: int) -> dict[str, PolicyStats]:
        """Return the counts by type of policy; `running` are the sequences that have blocks."""
        stats = {name: replace(counted) for name, counted in self._counted.items()}
        for sequence in running:
            policy, blocks = sequence.request.kv_policy, sequence.blocks
            if policy is not None and blocks is not None:
                own = stats[policy.type]
                run_tokens = sum(len(table.run) for table in blocks.tables) * block_size
                sink_tokens = sum(len(table.sink_blocks) for table in blocks.tables) * block_size
                own.num_dropped_blocks += blocks.num_dropped
                own.num_running += 1
                own.seen_tokens += blocks.processed
                own.kept_tokens += run_tokens + sink_tokens
                own.window_tokens += run_tokens
        return stats

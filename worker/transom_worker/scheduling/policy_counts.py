"""`PolicyCounts`: what KV policies keep, drop and change, by type of policy, for the metrics.

A *KV policy* is a request's own rule for what its full-attention layers keep: a window, an adaptive window or a heavy budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from transom_core.contract import Request
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import PolicyQuality

POLICY_TYPES = ("window", "adaptive", "heavy")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStats:
    """One type of policy. The last five are of the requests that run now; the others count since start.

    `kl`, `num_agreeing` and `dropped_mass` are sums over the `num_compared` tokens that were compared with full attention.
    """

    num_requests: int
    num_dropped_blocks: int
    num_compared: int
    kl: float
    num_agreeing: int
    dropped_mass: float
    num_running: int
    seen_tokens: int  # that were computed or found in the prefix cache
    kept_tokens: int  # that the blocks of these requests have room for
    window_tokens: int  # of these, without the sinks' blocks


class PolicyCounts:
    """Counts of one scheduler. Only the engine's thread calls it."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()  # blocks of sequences that have ended or were preempted
        self._compared: Counter[str] = Counter()
        self._agreeing: Counter[str] = Counter()
        self._kl: dict[str, float] = dict.fromkeys(POLICY_TYPES, 0.0)
        self._dropped_mass: dict[str, float] = dict.fromkeys(POLICY_TYPES, 0.0)

    def queued(self, request: Request) -> None:
        """Count a request that the scheduler has taken."""
        if request.kv_policy is not None:
            self._requests[request.kv_policy.type] += 1

    def compared(self, request: Request, quality: PolicyQuality) -> None:
        """Add what a step has found for one token of a request."""
        assert request.kv_policy is not None
        name = request.kv_policy.type
        self._compared[name] += 1
        self._agreeing[name] += quality.top_token_agrees
        self._kl[name] += quality.kl
        self._dropped_mass[name] += quality.dropped_mass

    def left(self, request: Request, blocks: SequenceBlocks) -> None:
        """Take over the count of a sequence whose blocks leave the device."""
        if request.kv_policy is not None:
            self._dropped[request.kv_policy.type] += blocks.num_dropped
            blocks.num_dropped = 0

    def stats(self, running: Iterable[Sequence], *, block_size: int) -> dict[str, PolicyStats]:
        """Return the counts by type of policy; `running` are the sequences that have blocks."""
        by_type: dict[str, list[SequenceBlocks]] = {name: [] for name in POLICY_TYPES}
        for sequence in running:
            policy, blocks = sequence.request.kv_policy, sequence.blocks
            if policy is not None and blocks is not None:
                by_type[policy.type].append(blocks)
        return {name: self._stats(name, by_type[name], block_size) for name in POLICY_TYPES}

    def _stats(self, name: str, running: list[SequenceBlocks], block_size: int) -> PolicyStats:
        tables = [table for blocks in running for table in blocks.tables]
        num_run_blocks = sum(len(table.run) for table in tables)
        return PolicyStats(
            num_requests=self._requests[name],
            num_dropped_blocks=self._dropped[name] + sum(blocks.num_dropped for blocks in running),
            num_compared=self._compared[name],
            kl=self._kl[name],
            num_agreeing=self._agreeing[name],
            dropped_mass=self._dropped_mass[name],
            num_running=len(running),
            seen_tokens=sum(blocks.processed for blocks in running),
            kept_tokens=(num_run_blocks + sum(len(table.sink_blocks) for table in tables)) * block_size,
            window_tokens=num_run_blocks * block_size,
        )

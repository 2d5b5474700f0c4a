"""`WorkCounts`: counts the tokens that steps compute, by reason, and the computed tokens that preemptions discard. A plan is
counted when it is made, not when its result arrives. `PolicyCounts`: counts what KV policies keep and drop.

A *window repair* computes cached tokens again, so that sliding windows get their KV. `recompute_until` is the position up to
which a sequence was scheduled before it was preempted.

The reason for computing a token depends on its position alone. The first range that has the position counts:

    0 ........ end of a window repair ........ recompute_until ........ tokens at arrival ........ end
    |  repair  |          recompute            |       prefill          |         decode           |

Example: a request arrives with a prompt of 100 tokens, is preempted after 110 tokens, and is later admitted with a hit of 64
tokens. Then it computes 46 tokens again (recompute, positions 64 to 109); all tokens after these are decode.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from transom_core.contract import Request
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import PolicyQuality


@dataclass(slots=True, kw_only=True)
class WorkCounts:
    """Tokens, rows, preemptions and swaps since start. Not thread-safe; the engine may hand a `copy` to any thread.

    The module's docstring says how the tokens are classified. A row of a plan counts as a prefill row unless all its tokens are
    decode.
    """

    num_tokens: int = 0
    prefill_tokens: int = 0
    repair_tokens: int = 0
    recompute_tokens: int = 0
    num_rows: int = 0
    prefill_rows: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    swapped_tokens: int = 0
    preempted_tokens: int = 0

    @property
    def decode_tokens(self) -> int:
        """Computed tokens that are neither prefill, repair nor recompute."""
        return self.num_tokens - self.prefill_tokens - self.repair_tokens - self.recompute_tokens

    @property
    def preemptions(self) -> dict[str, int]:
        """Preemptions since start, by mode."""
        return {"recompute": self.num_preemptions, "swap": self.num_swaps}

    @property
    def tokens_of_preempted(self) -> dict[str, int]:
        """Computed tokens that preemptions discarded since start, or kept in the host tier, by mode."""
        return {"recompute": self.preempted_tokens, "swap": self.swapped_tokens}

    @property
    def num_preempted(self) -> int:
        """Preemptions by recompute and by swap."""
        return self.num_preemptions + self.num_swaps

    def copy(self) -> WorkCounts:
        """Return a copy of the counts."""
        return replace(self)

    def planned(self, *, num_rows: int, num_tokens: int) -> None:
        """Count a plan of `num_rows` sequences and `num_tokens` tokens."""
        self.num_rows += num_rows
        self.num_tokens += num_tokens

    def admitted(self, sequence: Sequence, blocks: SequenceBlocks) -> None:
        """Note at which position an admitted sequence begins, and from which position on its tokens count as decode."""
        sequence.num_found_at_admission = blocks.processed
        sequence.decode_from = max(sequence.num_tokens_at_arrival, sequence.recompute_until, blocks.repair.end)

    def row_before_decode(self, sequence: Sequence, blocks: SequenceBlocks, start: int, end: int) -> None:
        """Count the tokens `[start, end)` of a row that begins before the sequence's `decode_from`."""
        self.prefill_rows += 1
        repair_end = min(end, max(start, blocks.repair.end))
        recompute_end = min(end, max(repair_end, sequence.recompute_until))
        prefill_end = min(end, max(recompute_end, sequence.num_tokens_at_arrival))
        self.repair_tokens += repair_end - start
        self.recompute_tokens += recompute_end - repair_end
        self.prefill_tokens += prefill_end - recompute_end

    def swapped(self, blocks: SequenceBlocks) -> None:
        """Count a preemption by swap: what was computed moves to the host tier."""
        self.num_swaps += 1
        self.swapped_tokens += blocks.processed

    def swap_lost(self, sequence: Sequence, blocks: SequenceBlocks) -> None:
        """Count the tokens of a swapped sequence as discarded, because the host tier's contents are not known any more."""
        self.preempted_tokens += blocks.processed
        sequence.recompute_until = max(sequence.recompute_until, blocks.processed)

    def preempted(self, sequence: Sequence, blocks: SequenceBlocks) -> None:
        """Count a preemption by recompute, and the computed tokens that it discards."""
        self.num_preemptions += 1
        if not (sequence.num_tokens_on_ranks or blocks.was_swapped):  # it was loading a hit, and has computed nothing
            return
        self.preempted_tokens += blocks.processed - sequence.num_found_at_admission
        sequence.recompute_until = max(sequence.recompute_until, sequence.scheduled, blocks.repair.end)


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
    """Counts for the metrics, by type of policy, what the KV policies of one scheduler's requests keep and drop, and how they
    change outputs. Only the engine's thread calls it.

    A *KV policy* is a request's own rule for what its full-attention layers keep: a window, an adaptive window or a heavy budget.
    """

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

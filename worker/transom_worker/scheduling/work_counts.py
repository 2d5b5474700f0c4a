"""What steps computed and why, and what preemptions threw away: counted as plans are made."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transom_worker.kvcache.sequence import SequenceBlocks
from transom_worker.scheduling.sequence import Sequence


@dataclass(slots=True, kw_only=True)
class WorkCounts:
    """Since start. Not thread-safe; `copy` may go to any thread.

    A computed token is a *repair* below the end of a window repair; else *recompute* where a preemption threw it away; else
    *prefill* where it was known when the request came; else *decode*. A row is one of decode if all its tokens are.
    """

    num_tokens: int = 0
    prefill_tokens: int = 0
    repair_tokens: int = 0
    recompute_tokens: int = 0
    num_rows: int = 0
    prefill_rows: int = 0
    num_preemptions: int = 0
    preempted_tokens: int = 0

    @property
    def decode_tokens(self) -> int:
        """The others."""
        return self.num_tokens - self.prefill_tokens - self.repair_tokens - self.recompute_tokens

    def copy(self) -> WorkCounts:
        """As they are now."""
        return replace(self)

    def planned(self, *, num_rows: int, num_tokens: int) -> None:
        """A plan was made."""
        self.num_rows += num_rows
        self.num_tokens += num_tokens

    def admitted(self, sequence: Sequence, blocks: SequenceBlocks) -> None:
        """A sequence goes on from a hit: from where on is it decoding?"""
        sequence.began_at = blocks.processed
        sequence.decode_from = max(sequence.num_known_at_first, sequence.lost_until, blocks.repair_until)

    def row_before_decode(self, sequence: Sequence, blocks: SequenceBlocks, start: int, end: int) -> None:
        """A row of a plan begins below `decode_from`."""
        self.prefill_rows += 1
        at = min(end, max(start, blocks.repair_until))
        self.repair_tokens += at - start
        known = min(end, max(at, sequence.lost_until))
        self.recompute_tokens += known - at
        self.prefill_tokens += min(end, max(known, sequence.num_known_at_first)) - known

    def preempted(self, sequence: Sequence, blocks: SequenceBlocks) -> None:
        """A sequence goes back to the queue."""
        self.num_preemptions += 1
        self.preempted_tokens += blocks.processed - sequence.began_at
        sequence.lost_until = max(sequence.lost_until, blocks.processed, blocks.repair_until)

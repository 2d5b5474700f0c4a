"""Why each token of a plan is computed, told from plans alone: the check on the scheduler's own counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from transom_worker.scheduling.step import StepPlan


@dataclass
class Seen:
    """One request: tokens that it came with, and below which position everything was once there."""

    num_known: int
    reached: int = 0  # now
    lost_until: int = 0
    computed: int = 0  # since it was let in


class WorkModel:
    """Reads plans in order."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self.thrown_away = 0  # by preemptions of requests that were let in again
        self._seen: dict[str, Seen] = {}
        self._requests: dict[int, str] = {}

    def take(self, plan: StepPlan) -> None:
        """Count one plan."""
        for new in plan.new_sequences:
            self._requests[new.seq_id] = new.request_id
            seen = self._seen.setdefault(new.request_id, Seen(len(new.token_ids)))
            seen.lost_until = max(seen.lost_until, seen.reached)
            self.thrown_away += seen.computed
            seen.computed = 0
        for row, seq_id in enumerate(plan.seq_ids):
            start, end = plan.start[row], plan.start[row] + plan.count[row]
            seen = self._seen[self._requests[seq_id]]
            repair_until = max(bounds[row] for bounds in plan.write_from)
            kinds = Counter(self._phase(position, seen, repair_until) for position in range(start, end))
            seen.reached = max(seen.reached, end, repair_until)
            seen.computed += end - start
            self.tokens += kinds
            self.rows["decode" if set(kinds) == {"decode"} else "prefill"] += 1

    def _phase(self, position: int, seen: Seen, repair_until: int) -> str:
        if position < repair_until:
            return "repair"
        if position < seen.lost_until:
            return "recompute"
        return "prefill" if position < seen.num_known else "decode"

"""`VirtualClock` and `StepCost`: a simulation's clock, which advances by the time that each step would take on a real GPU.

So the requests of a recorded trace overlap about as much as they did when they were recorded. Example with the default costs: a
step of 2,000 tokens takes 0.008 + 2,000 * 0.00002 = 0.048 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transom_worker.scheduling.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The duration of a step: a fixed part, and a part per computed token. The defaults suit a 20B model on one large GPU.

    Loads from the host tier run at `load_bytes_per_s` while the step computes; the longer of the two counts.
    """

    step_s: float = 0.008
    token_s: float = 0.00002
    load_bytes_per_s: float = 16 * 2**30

    def of(self, plan: StepPlan, block_bytes: Sequence[int] = ()) -> float:
        """Return the seconds that a plan takes; `block_bytes` has, by group, the bytes of a block that is loaded."""
        loads = zip(plan.copy_group, plan.copy_ticket, strict=False)
        load_bytes = sum(block_bytes[group] for group, ticket in loads if ticket > 0)
        return max(self.step_s + self.token_s * plan.num_tokens, load_bytes / self.load_bytes_per_s)


class VirtualClock:
    """Seconds since the workload's beginning. It is callable, so that it can serve as the cache's clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Advance the clock by this many seconds."""
        self.now_s += seconds

    def wait_until(self, moment_s: float) -> None:
        """Advance the clock to a moment, if it is in the future."""
        self.now_s = max(self.now_s, moment_s)

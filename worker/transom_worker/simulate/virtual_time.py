"""A clock that moves by what a step would cost, so that recorded arrivals overlap as they did."""

from __future__ import annotations

from dataclasses import dataclass

from transom_worker.scheduling.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step: a fixed part, and a part per token computed. The defaults suit a 20B model on one large GPU."""

    step_s: float = 0.008
    token_s: float = 0.00002

    def of(self, plan: StepPlan) -> float:
        """Seconds that `plan` takes."""
        return self.step_s + self.token_s * plan.num_tokens


class VirtualClock:
    """Seconds since the workload's beginning; a callable, as the cache wants its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    def wait_until(self, moment_s: float) -> None:
        """Let time pass up to a moment, if it lies ahead."""
        self.now_s = max(self.now_s, moment_s)

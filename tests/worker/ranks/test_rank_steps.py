"""In which order a rank launches and finishes plans, over a device that computes while the host goes on."""

from collections import deque
from typing import Any

import pytest

from transom_core.errors import StepFailed
from transom_worker.execution.ranks.messages import ReadBlocks, RunStep
from transom_worker.execution.ranks.rank_main import _Rank
from transom_worker.scheduling.step import StepPlan, StepResult


class Ended(Exception):
    """No message is left."""


class Step:
    """A launched step; the device computes it when the rank looks at it for the `looks`-th time."""

    def __init__(self, plan: StepPlan, looks: int) -> None:
        self.plan, self._looks = plan, looks

    @property
    def is_done(self) -> bool:
        self._looks -= 1
        return self._looks < 0


class Bench:
    """The runner, its tiers and the executor's channel of one rank; `done` has what they did, in order."""

    was_committed = False
    usage = None

    def __init__(
        self,
        messages: list[Any],
        *,
        runs_ahead: bool,
        looks: int = 0,
        refused: int | None = None,
        waits: int | None = None,
    ) -> None:
        self.messages, self.runs_ahead, self._looks = deque(messages), runs_ahead, looks
        self._refused, self._waits = refused, waits
        self.tiers = self
        self.done: list[str] = []

    def waits_in_launch(self, plan: StepPlan) -> bool:
        return plan.step_id == self._waits

    def launch(self, plan: StepPlan) -> Step:
        if plan.step_id == self._refused:
            raise StepFailed("It contradicts the sequences.")
        self.done.append(f"launch {plan.step_id}")
        return Step(plan, self._looks)

    def finish(self, step: Step) -> StepResult:
        self.done.append(f"finish {step.plan.step_id}")
        return StepResult(step_id=step.plan.step_id)

    def abandon(self, plan: StepPlan) -> None:
        self.done.append(f"abandon {plan.step_id}")

    def read(self, *where: Any) -> bytes:
        self.done.append("read")
        return b""

    def send(self, message: Any) -> None:
        if type(message).__name__ in ("StepResult", "RankFailed"):
            self.done.append(f"send {type(message).__name__}")

    def has_message(self) -> bool:
        return bool(self.messages)

    def receive(self) -> Any:
        if not self.messages:
            raise Ended
        return self.messages.popleft()


def run(bench: Bench) -> list[str]:
    rank: Any = _Rank.__new__(_Rank)
    rank._channel, rank._runner, rank._epoch, rank._usage_sent_s, rank._launched = bench, bench, 0, 0.0, None
    rank._setup = type("Setup", (), {"rank": 0, "size": 2})
    with pytest.raises(Ended):
        rank.serve()
    return [what for what in bench.done if what != "send StepResult"]


def step(number: int, epoch: int = 0) -> RunStep:
    return RunStep(epoch, StepPlan(step_id=number))


def test_a_cpu_computes_one_plan_after_the_other() -> None:
    assert run(Bench([step(1), step(2)], runs_ahead=False)) == ["launch 1", "finish 1", "launch 2", "finish 2"]


@pytest.mark.parametrize(
    ("looks", "order"),
    [
        # The device is faster than the host.
        (0, ["launch 1", "finish 1", "launch 2", "finish 2", "launch 3", "finish 3"]),
        (3, ["launch 1", "launch 2", "finish 1", "launch 3", "finish 2", "finish 3"]),
    ],
)
def test_a_gpu_has_the_next_plan_before_the_last_one_has_ended(looks: int, order: list[str]) -> None:
    """The last plan is finished when the device has computed it, although no message comes."""
    bench = Bench([step(1), step(2), step(3)], runs_ahead=True, looks=looks)
    assert run(bench) == order
    assert bench.done.count("send StepResult") == 3


def test_a_result_does_not_wait_for_a_launch_that_waits_for_the_device() -> None:
    bench = Bench([step(1), step(2), step(3)], runs_ahead=True, waits=2, looks=3)
    assert run(bench) == ["launch 1", "finish 1", "launch 2", "launch 3", "finish 2", "finish 3"]


def test_blocks_are_read_after_the_launched_plan() -> None:
    bench = Bench([step(1), ReadBlocks(call=1, tier=0, group=0, blocks=(1,)), step(2)], runs_ahead=True)
    assert run(bench) == ["launch 1", "finish 1", "read", "launch 2", "finish 2"]


def test_a_refusal_follows_the_results_of_earlier_plans() -> None:
    """Plans of the old epoch are dropped; later ones run."""
    bench = Bench([step(1), step(2), step(3), step(4, epoch=1)], runs_ahead=True, refused=2)
    assert run(bench) == ["launch 1", "finish 1", "abandon 2", "send RankFailed", "abandon 3", "launch 4", "finish 4"]

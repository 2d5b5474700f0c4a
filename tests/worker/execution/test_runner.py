"""Plans that contradict what a rank knows, and a result that is none."""

from pathlib import Path

import pytest

from tests.worker.execution.hand_scheduler import HandScheduler, engine_config, make_runner
from transom_core.errors import RankLost
from transom_worker.execution.runner import ModelRunner


@pytest.fixture
def runner(tiny_model: Path) -> ModelRunner:
    return make_runner(engine_config(tiny_model))


def test_wrong_plans_are_refused(runner: ModelRunner) -> None:
    hand = HandScheduler(runner.info.layout)
    hand.add(0, [5, 6, 7])
    plan = hand.plan({0: 3})
    plan.delta_blocks, plan.delta_offset = [], [0, 0]
    with pytest.raises(ValueError, match="has no block"):
        runner.execute(plan)
    plan = hand.plan({})
    plan.seq_ids = [12]
    plan.input_row, plan.input_id, plan.start, plan.count = [-1], [7], [0], [1]
    with pytest.raises(ValueError, match="sequence 12, which was never given"):
        runner.execute(plan)


def test_a_result_after_an_aborted_collective_is_none(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that waited for a rank that hangs goes on with whatever its memory holds."""

    def check(self: object) -> None:
        raise RankLost("the other ranks are late")

    hand = HandScheduler(runner.info.layout)
    hand.add(0, [5, 6, 7, 8])
    step = runner.launch(hand.plan({0: 4}))
    monkeypatch.setattr(type(runner._parallel.comm), "check", check)
    with pytest.raises(RankLost, match="late"):
        runner.finish(step)

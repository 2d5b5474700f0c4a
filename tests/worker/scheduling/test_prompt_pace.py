"""The pace that is learned from steps, and the limits that follow from it."""

from __future__ import annotations

import pytest

from transom_worker.scheduling.prompt_pace import FIRST_TOKENS, LEAST_TOKENS, PromptPace
from transom_worker.scheduling.step import StepPlan, StepTimings


def step(*rows: tuple[int, int]) -> StepPlan:
    return StepPlan(step_id=0, start=[start for start, _ in rows], count=[count for _, count in rows])


def takes(seconds: float) -> StepTimings:
    return StepTimings(prepare_s=0.1 * seconds, copy_s=0.1 * seconds, forward_s=0.7 * seconds, sample_s=0.1 * seconds)


def test_before_anything_was_measured():
    pace = PromptPace(0.1)
    assert pace.limit(0, decodes=True) == FIRST_TOKENS
    pace.stepped(step((40, 1), (7, 1)), takes(0.03))
    pace.stepped(step((0, 100)), StepTimings())  # a stub's
    assert pace.limit(0, decodes=True) == FIRST_TOKENS


def test_the_example_of_the_docstring():
    pace = PromptPace(0.1)
    pace.stepped(step((40, 1)), takes(0.03))
    pace.stepped(step((0, 200)), takes(200 * 0.0005))
    assert pace.limit(0, decodes=True) == pytest.approx(140, abs=1)
    assert pace.limit(0, decodes=False) == pytest.approx(200, abs=1)


def test_a_step_with_decoding_rows_counts_without_their_time():
    pace = PromptPace(0.1)
    pace.stepped(step((40, 1)), takes(0.03))
    pace.stepped(step((41, 1), (0, 100)), takes(0.03 + 100 * 0.001))
    assert pace.limit(0, decodes=False) == pytest.approx(100, abs=1)


def test_contexts_have_paces_of_their_own_and_borrow_the_nearest():
    pace = PromptPace(1.0)
    pace.stepped(step((0, 100)), takes(0.1))
    assert pace.limit(8192, decodes=False) == pytest.approx(1000, abs=1)
    pace.stepped(step((4096, 100)), takes(0.4))
    assert pace.limit(0, decodes=False) == pytest.approx(1000, abs=1)
    assert pace.limit(4096, decodes=False) == pace.limit(8192, decodes=False) == pytest.approx(250, abs=1)


def test_slow_decoding_leaves_half_of_the_target_and_a_slow_machine_a_few_tokens():
    pace = PromptPace(0.1)
    pace.stepped(step((40, 1)), takes(5.0))
    pace.stepped(step((0, 100)), takes(0.1))
    assert pace.limit(0, decodes=True) == pytest.approx(50, abs=1)
    pace.stepped(step((0, 100)), takes(1000.0))
    assert pace.limit(0, decodes=True) == LEAST_TOKENS


def test_steps_of_fixed_and_proportional_time_come_to_the_target():
    """Each step costs 20 ms and 0.6 ms a token; the limit's own steps are what is measured."""
    pace, elapsed_s = PromptPace(0.1), 0.0
    for _ in range(40):
        num_tokens = pace.limit(0, decodes=False)
        elapsed_s = 0.02 + 0.0006 * num_tokens
        pace.stepped(step((0, num_tokens)), takes(elapsed_s))
    assert elapsed_s == pytest.approx(0.1, rel=0.05)


def test_equal_measurements_give_equal_limits():
    def limits() -> list[int]:
        pace, found = PromptPace(0.1), []
        for number in range(1, 30):
            pace.stepped(step((0, 16 * number), (9, 1)), takes(0.01 * (number % 7 + 1)))
            found.append(pace.limit(100 * number, decodes=bool(number % 2)))
        return found

    assert limits() == limits()

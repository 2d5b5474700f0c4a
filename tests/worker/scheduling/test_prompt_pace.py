"""The pace that is learned from steps, and the limits that follow from it."""

from __future__ import annotations

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
    pace = PromptPace(0.2)
    pace.stepped(step((40, 1)), takes(0.06))
    pace.stepped(step((0, 200)), takes(200 * 0.0005))
    assert pace.limit(0, decodes=True) == 256
    assert pace.limit(0, decodes=False) == 384  # 400, rounded down


def test_a_step_with_decoding_rows_counts_without_their_time():
    pace = PromptPace(1.01)
    pace.stepped(step((40, 1)), takes(0.03))
    pace.stepped(step((41, 1), (0, 100)), takes(0.03 + 100 * 0.001))
    assert pace.limit(0, decodes=False) == 960


def test_contexts_have_paces_of_their_own_and_borrow_the_nearest():
    pace = PromptPace(1.01)
    pace.stepped(step((0, 100)), takes(0.1))
    assert pace.limit(8192, decodes=False) == 960
    pace.stepped(step((4096, 100)), takes(0.4))
    assert pace.limit(0, decodes=False) == 960
    assert pace.limit(4096, decodes=False) == pace.limit(8192, decodes=False) == 192


def test_prompts_have_half_of_the_target_and_as_much_time_as_decoding():
    pace = PromptPace(1.0)
    pace.stepped(step((0, 100)), takes(0.1))
    pace.stepped(step((40, 1)), takes(0.6))
    assert pace.limit(0, decodes=True) == 576
    slow = PromptPace(1.0)
    slow.stepped(step((0, 100)), takes(0.1))
    slow.stepped(step((40, 1)), takes(2.0))
    assert slow.limit(0, decodes=True) == 1984


def test_a_slow_machine_computes_a_chunk_that_is_worth_a_step():
    pace = PromptPace(0.1)
    pace.stepped(step((0, 100)), takes(1000.0))
    assert pace.limit(0, decodes=True) == LEAST_TOKENS


def test_steps_of_fixed_and_proportional_time_come_to_the_target():
    """Each step costs 20 ms and 0.4 ms a token; the limit's own steps are what is measured."""
    pace, elapsed_s = PromptPace(0.2), 0.0
    for _ in range(40):
        num_tokens = pace.limit(0, decodes=False)
        elapsed_s = 0.02 + 0.0004 * num_tokens
        pace.stepped(step((0, num_tokens)), takes(elapsed_s))
    assert 0.2 - 64 * 0.0006 < elapsed_s <= 0.2

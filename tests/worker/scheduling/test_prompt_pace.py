"""The pace that is learned from steps, the limits that follow from it, and how prompts share them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.scheduling.scheduler_driver import Driver, layout, request
from transom_worker.scheduling.dividing import QUANTUM, share_limit
from transom_worker.scheduling.prompt_pace import FIRST_TOKENS, LEAST_TOKENS, PromptPace
from transom_worker.scheduling.step import StepPlan, StepTimings


def step(*rows: tuple[int, int]) -> StepPlan:
    return StepPlan(step_id=0, start=[start for start, _ in rows], count=[count for _, count in rows])


def takes(seconds: float) -> StepTimings:
    return StepTimings(prepare_s=0.1 * seconds, copy_s=0.1 * seconds, forward_s=0.7 * seconds, sample_s=0.1 * seconds)


DECODES, PROMPT = step((40, 1)), step((0, 100))


@pytest.mark.parametrize(
    ("target_s", "steps", "decodes", "context", "limit"),
    [
        pytest.param(
            0.1, [(step((40, 1), (7, 1)), 0.03), (PROMPT, 0.0)], True, 0, FIRST_TOKENS, id="nothing, or a stub's"
        ),
        pytest.param(0.2, [(DECODES, 0.06), (step((0, 200)), 0.1)], True, 0, 256, id="the docstring's example"),
        pytest.param(0.2, [(DECODES, 0.06), (step((0, 200)), 0.1)], False, 0, 384, id="400, rounded down"),
        pytest.param(
            1.01, [(DECODES, 0.03), (step((41, 1), (0, 100)), 0.13)], False, 0, 960, id="without decoding rows"
        ),
        pytest.param(1.01, [(PROMPT, 0.1)], False, 8192, 960, id="the nearest context"),
        pytest.param(1.01, [(PROMPT, 0.1), (step((4096, 100)), 0.4)], False, 0, 960, id="contexts apart"),
        pytest.param(1.01, [(PROMPT, 0.1), (step((4096, 100)), 0.4)], False, 4096, 192, id="a long context"),
        pytest.param(1.01, [(PROMPT, 0.1), (step((4096, 100)), 0.4)], False, 8192, 192, id="the nearest of two"),
        pytest.param(1.0, [(PROMPT, 0.1), (DECODES, 0.6)], True, 0, 576, id="half of the target"),
        pytest.param(1.0, [(PROMPT, 0.1), (DECODES, 2.0)], True, 0, 1984, id="as much time as decoding"),
        pytest.param(0.1, [(PROMPT, 1000.0)], True, 0, LEAST_TOKENS, id="a chunk that is worth a step"),
    ],
)
def test_limits_follow_from_measured_steps(target_s, steps, decodes, context, limit):
    pace = PromptPace(target_s)
    for plan, seconds in steps:
        pace.stepped(plan, takes(seconds))
    assert pace.limit(context, decodes=decodes) == limit


def test_steps_of_fixed_and_proportional_time_come_to_the_target():
    """Each step costs 20 ms and 0.4 ms a token; the limit's own steps are what is measured."""
    pace, elapsed_s = PromptPace(0.2), 0.0
    for _ in range(40):
        num_tokens = pace.limit(0, decodes=False)
        assert num_tokens is not None
        elapsed_s = 0.02 + 0.0004 * num_tokens
        pace.stepped(step((0, num_tokens)), takes(elapsed_s))
    assert 0.2 - 64 * 0.0006 < elapsed_s <= 0.2


def test_the_example_of_shares_in_the_docstring():
    assert share_limit(200, [1500, 60, 900, 30], num_running=1) == [100, 60, 10, 30]
    assert share_limit(200, [1500], num_running=1) == [200]
    assert share_limit(200, [], num_running=0) == []


def test_equal_prompts_are_computed_one_after_the_other():
    assert share_limit(100, [300, 300, 300], num_running=0) == [100, 0, 0]
    assert share_limit(100, [40, 300, 300], num_running=1) == [40, 60, 0]
    assert share_limit(700, [300, 300, 300], num_running=0) == [300, 300, 100]


def test_a_waiting_prompt_starts_so_that_one_behind_it_can():
    assert share_limit(100, [1500, 900, 50], num_running=1) == [50, QUANTUM, 50]
    assert share_limit(100, [1500, 900, 50], num_running=2) == [50, 0, 50]  # it runs already


@given(st.integers(1, 300), st.lists(st.integers(0, 500), min_size=1, max_size=12), st.data())
def test_any_shares(limit, needs, data):
    num_running = data.draw(st.integers(0, len(needs)))
    shares = share_limit(limit, needs, num_running=num_running)
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    assert shares[0] >= min(needs[0], (limit + 1) // 2)
    assert sum(shares) >= min(limit, sum(needs))  # nothing is left unused
    quanta = sum(share for share in shares[max(1, num_running) :] if share <= QUANTUM)
    assert sum(shares) - quanta <= limit


class FixedPace(PromptPace):
    """The same limit for every step."""

    def __init__(self, limit: int) -> None:
        super().__init__(1.0)
        self._limit = limit
        self.asked: list[tuple[int, bool]] = []

    def limit(self, context: int, *, decodes: bool) -> int:
        self.asked.append((context, decodes))
        return self._limit


def paced(limit: int) -> tuple[Driver, FixedPace]:
    pace = FixedPace(limit)
    driver = Driver(
        layout(["full"], num_pages=400), max_model_len=500, max_num_batched_tokens=256, max_num_seqs=8, pace=pace
    )
    return driver, pace


def counts(driver: Driver) -> list[int]:
    plan = driver.schedule()
    assert plan is not None
    driver.receive()
    return plan.count


def test_a_prompt_alone_has_no_limit():
    driver, pace = paced(16)
    driver.add(request("long", range(300), 4))
    assert counts(driver) == [256]
    assert not pace.asked
    driver.run()


def test_a_decoding_request_limits_a_prompt():
    driver, pace = paced(20)
    driver.add(request("first", range(10), 60))
    assert counts(driver) == [10]
    driver.add(request("long", range(100, 400), 4))
    assert counts(driver) == [1, 20]
    assert counts(driver) == [1, 20]
    assert pace.asked == [(0, True), (20, True)]
    driver.run()


def test_short_prompts_pass_a_long_one():
    driver, _ = paced(64)
    driver.add(request("long", range(400), 2))
    for number in range(3):
        driver.add(request(f"short {number}", [1000 + number, *range(19)], 2))
    assert counts(driver) == [32, 20, 12]  # the third one's first tokens fill the step
    assert sum(counts(driver)) <= 64 + 1
    driver.run()
    assert driver.finished[-1] == "long"
    order = [name for name in driver.finished if name != "long"]
    assert order == sorted(order)

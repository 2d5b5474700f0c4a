"""The pace that is learned from steps, the limits that follow from it, and how prompts share them."""

from __future__ import annotations

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

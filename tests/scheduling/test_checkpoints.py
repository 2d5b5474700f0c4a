"""Where clients come back: what the left-behind blocks of a window do not survive, checkpoints do."""

from __future__ import annotations

import pytest
from scheduler_driver import BLOCK, Driver, layout, request

from lost_windows import lose_left_behind

SYSTEM = list(range(32))
MIXES = (("full", "window"), ("full", "sinks_window"), ("full", "window", "ragged_chunk"))


def driver_of(mix: tuple[str, ...]) -> Driver:
    return Driver(layout(mix, num_pages=200), max_model_len=200, max_num_batched_tokens=24, window_repair=False)


def hit_of(driver: Driver, name: str, prompt: list[int], **fields: object) -> int:
    """Serve a request; prompt tokens that it found."""
    driver.add(request(name, prompt, 3, **fields))
    driver.run()
    return driver.outputs[name][0].num_cached_tokens


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_the_second_user_of_a_system_prompt_hits_it(mix: tuple[str, ...]) -> None:
    driver = driver_of(mix)
    turns = {"turn_boundaries": (len(SYSTEM), 60)}
    assert hit_of(driver, "first", SYSTEM + [100] * 40, **turns) == 0
    lose_left_behind(driver.scheduler.cache)
    assert hit_of(driver, "second", SYSTEM + [200] * 40, **turns) == len(SYSTEM)


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_without_turn_ends_the_third_user_hits_it(mix: tuple[str, ...]) -> None:
    """The second one shows where chains part."""
    driver = driver_of(mix)
    for user in range(2):
        assert hit_of(driver, f"user {user}", SYSTEM + [100 + user] * 40) <= 8  # what sink blocks alone suffice for
        lose_left_behind(driver.scheduler.cache)
    assert hit_of(driver, "user 2", SYSTEM + [102] * 40) == len(SYSTEM)


@pytest.mark.parametrize("kept", [36, 48])
def test_an_edit_of_one_of_the_last_two_turns_hits(kept: int) -> None:
    driver = driver_of(("full", "window"))
    prompt = [7 * i % 50 for i in range(61)]
    assert hit_of(driver, "whole", prompt, turn_boundaries=(12, 24, 36, 48)) == 0
    lose_left_behind(driver.scheduler.cache)
    assert hit_of(driver, "edited", prompt[:kept] + [99] * 20, turn_boundaries=(12, 24, kept)) == kept


def test_the_next_turn_hits_the_end_of_the_answer_and_a_regeneration_the_end_of_the_prompt() -> None:
    driver = driver_of(("full", "window"))
    prompt = list(range(41))
    hit_of(driver, "turn", prompt)
    answered = prompt + driver.tokens["turn"]
    lose_left_behind(driver.scheduler.cache)
    assert hit_of(driver, "next", answered + [70] * 20) == (len(answered) - 1) // BLOCK * BLOCK
    lose_left_behind(driver.scheduler.cache)
    assert hit_of(driver, "again", prompt) == 40

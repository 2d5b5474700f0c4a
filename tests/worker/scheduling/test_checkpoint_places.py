"""Where clients return to, under memory pressure: only what a checkpoint pins is left, and windows are never repaired."""

from __future__ import annotations

import pytest

from tests.lost_windows import lose_left_behind
from tests.worker.scheduling.scheduler_driver import Driver, layout, request

MIXES = [("full", "window"), ("full", "sinks_window"), ("full", "window", "ragged_chunk"), ("window",)]
SYSTEM = list(range(40))


class Client:
    """Sends chats to one driver; says how many prompt tokens were cached."""

    def __init__(self, mix: tuple[str, ...]) -> None:
        self.driver = Driver(layout(mix, num_pages=400), max_model_len=200, window_repair=False)

    def cached(self, prompt: list[int], *, turns: tuple[int, ...] = (), max_tokens: int = 6) -> int:
        name = str(len(self.driver.requests))
        self.driver.add(request(name, prompt, max_tokens, turn_boundaries=turns))
        self.driver.run()
        lose_left_behind(self.driver.scheduler.cache)
        self.driver.check()
        return self.driver.outputs[name][0].num_cached_tokens


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_the_second_user_of_a_system_prompt_hits_it(mix: tuple[str, ...]) -> None:
    client = Client(mix)
    for user in range(4):
        question = [100 + user] * 13
        assert client.cached([*SYSTEM, *question, 7, 7], turns=(40, 53)) == (40 if user else 0)


@pytest.mark.parametrize("mix", [mix for mix in MIXES if "full" in mix], ids="+".join)
def test_without_turn_ends_the_third_user_hits_it(mix: tuple[str, ...]) -> None:
    """The second one shows where chains part."""
    client = Client(mix)
    for user in range(2):
        assert client.cached([*SYSTEM, *[100 + user] * 40]) <= 8  # what sink blocks alone suffice for
    assert client.cached([*SYSTEM, *[102] * 40]) == len(SYSTEM)


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_an_edit_of_the_last_messages_and_a_regeneration_hit_their_turns(mix: tuple[str, ...]) -> None:
    client = Client(mix)
    chat = [*SYSTEM, *[1] * 12, *[2] * 12, *[3] * 12, 7, 7]
    assert client.cached(chat, turns=(40, 52, 64, 76)) == 0
    assert client.cached(chat) == 76  # once more
    assert client.cached([*chat[:64], *[4] * 20], turns=(40, 52, 64, 84)) == 64
    assert client.cached([*chat[:52], *[5] * 20], turns=(40, 52, 72)) == 40  # only the last two turns are kept


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_the_next_turn_hits_the_answer(mix: tuple[str, ...]) -> None:
    client = Client(mix)
    chat = [*SYSTEM, 1, 1, 1]
    client.cached(chat, turns=(40,), max_tokens=30)
    answer = client.driver.tokens["0"]
    assert client.cached([*chat, *answer, 9, 9, 9], turns=(40, 43, 73)) == 72


def test_boundaries_inside_the_hit_are_not_planned_again() -> None:
    client = Client(("full", "window"))
    chat = [*SYSTEM, *[1] * 12]
    client.cached(chat, turns=(40, 52))
    driver = client.driver
    driver.add(request("again", [*chat, *[2] * 12, 7], 2, turn_boundaries=(40, 52, 64)))
    driver.schedule()
    blocks = driver.scheduler.by_request["again"].blocks
    assert blocks is not None
    assert [units for units, _ in blocks.planned_checkpoints] == [16]
    driver.receive()
    driver.run()


def test_a_client_that_leaves_before_the_first_token_leaves_no_checkpoint() -> None:
    driver = Driver(layout(["full", "window"], num_pages=400), max_num_batched_tokens=16)
    for name, num_steps, num_checkpoints in (("early", 2, 0), ("late", 6, 2)):
        driver.add(request(name, [*name.encode(), *range(50)], 40))
        for _ in range(num_steps):
            driver.step()
        driver.abort(name)
        assert sum(driver.scheduler.stats().checkpoints.current.values()) == num_checkpoints

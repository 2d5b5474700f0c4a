"""Single behaviours of the scheduler; random requests are in `test_scheduler_random`. Where clients return to, under memory
pressure: only what a checkpoint pins is left, and windows are never repaired."""

import pytest

from tests.lost_windows import lose_left_behind, lose_windows
from tests.worker.scheduling.scheduler_driver import BLOCK, Driver, layout, request
from transom_worker.scheduling.step_budget import StepBudget, chunk_limit


def roomy(*mix: str, **config: object) -> Driver:
    return Driver(layout(mix or ("full", "window"), num_pages=200), **config)  # type: ignore[arg-type]


def test_an_urgent_long_prompt_leaves_a_token_for_those_behind_it() -> None:
    driver = roomy(max_num_batched_tokens=16, policy="priority")
    driver.add(request("short", range(3), 20, priority=1))
    driver.step()
    driver.add(request("long", range(80), 2, priority=0))
    driver.step()
    assert driver.next_plan().count == [15, 1]
    driver.receive()
    driver.run()


def test_one_chunk_takes_a_bounded_part_of_the_pool() -> None:
    layout_ = layout(["full", "window"], num_pages=200)  # 4,096 bytes a page, 768 a window block
    assert chunk_limit(layout_, BLOCK) == 200 * 4096 // 16 // 768 * BLOCK
    assert chunk_limit(layout(["full"], num_pages=200), BLOCK) is None
    assert chunk_limit(layout(["full", "window"], num_pages=1), BLOCK) == BLOCK
    assert StepBudget(1000, block_size=BLOCK, max_chunk=40).for_new == 40


def test_as_many_fit_as_are_admitted() -> None:
    driver = Driver(layout(["full", "window"], num_pages=9), max_num_seqs=64, max_num_batched_tokens=1024)
    cache = driver.scheduler.cache
    for num_tokens in (2, BLOCK, 40, 96):
        most = cache.capacity.num_that_fit(num_tokens)
        needs = [retention.peak_blocks(num_tokens - 1) for retention in cache.retentions]
        assert cache.allocator.pages_needed([most * need for need in needs]) is not None
        assert cache.allocator.pages_needed([(most + 1) * need for need in needs]) is None
    empty = cache.capacity.num_that_fit(BLOCK)
    driver.add(request("a", range(30), 2))
    driver.schedule()
    assert 0 < cache.capacity.num_that_fit(BLOCK) < empty
    driver.run()
    assert cache.capacity.num_that_fit(BLOCK) == empty  # what is cached can be evicted
    driver.check_idle()


def test_a_window_repair_reads_full_groups_and_writes_windows_below_its_end() -> None:
    """Two layers per group, in turns, blocks of 4. A prompt of 61 tokens whose windows are lost goes on at n = 60.

    With a window of 10, block 12 is the first live one; from 48 down one layer: 48 - 9 = 39, so the repair starts at 36.
    """
    driver = Driver(layout(("full", "window"), num_pages=200), max_num_batched_tokens=16)
    driver.add(request("cold", range(61), 2))
    driver.run()
    lose_windows(driver.scheduler.cache)
    driver.add(request("repaired", range(61), 2))
    plans = []
    while (plan := driver.schedule()) is not None:
        plans.append(plan)
        driver.receive()
        driver.check()
    first, second, third = plans
    assert (first.start, first.count) == ([36], [16])
    assert (first.write_from, first.attend_from) == ([[60], [36]], [[0], [36]])
    assert (second.start, second.count, second.sample) == ([52], [9], [1])  # crosses n
    assert (second.write_from, second.attend_from) == ([[60], [52]], [[0], [36]])
    assert (third.write_from, third.attend_from) == ([[61], [61]], [[0], [0]])
    assert driver.outputs["repaired"][0].num_cached_tokens == 36
    assert driver.scheduler.stats().outcome_tokens["repaired"] == 24
    driver.add(request("again", range(61), 2))
    assert driver.next_plan().start == [60]
    driver.receive()
    driver.run()
    assert driver.executor.num_repaired == 24


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
    assert client.cached([*chat, *client.driver.tokens["0"], 9, 9, 9], turns=(40, 43, 73)) == 72


def test_a_client_that_leaves_before_the_first_token_leaves_no_checkpoint() -> None:
    driver = Driver(layout(["full", "window"], num_pages=400), max_num_batched_tokens=16)
    for name, num_steps, num_checkpoints in (("early", 2, 0), ("late", 6, 2)):
        driver.add(request(name, [*name.encode(), *range(50)], 40))
        for _ in range(num_steps):
            driver.step()
        driver.abort(name)
        assert sum(driver.scheduler.stats().checkpoints.current.values()) == num_checkpoints

"""KV policies in the scheduler: what sequences keep, publish and find, whatever runs beside them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from tests.worker.scheduling.kept_blocks_model import kept_blocks
from tests.worker.scheduling.scheduler_driver import BLOCK, Driver, layout, request
from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, SamplingParams, WindowPolicy
from transom_core.errors import PromptTooLong, RequestError, RequestTooLarge
from transom_core.kv_cache.load_rates import LoadRates
from transom_worker.scheduling.step import WHOLE_TABLE

WINDOWS = (
    WindowPolicy(sinks=0, window=8),
    WindowPolicy(sinks=4, window=1),
    WindowPolicy(sinks=5, window=7),
    WindowPolicy(sinks=9, window=17),
)
HISTORIES = (
    AdaptivePolicy(sinks=4, min_window=4, max_window=32, threshold=0.1),
    AdaptivePolicy(sinks=0, min_window=9, max_window=16, threshold=0.12),
    AdaptivePolicy(sinks=5, min_window=1, max_window=8, threshold=0.05),
    HeavyPolicy(sinks=4, budget=16),
    HeavyPolicy(sinks=0, budget=33),
    HeavyPolicy(sinks=5, budget=48),
)


def driver(num_pages: int = 60, **settings: object) -> Driver:
    return Driver(layout(("full",), num_pages=num_pages), **settings)  # type: ignore[arg-type]


def held(driver: Driver, name: str) -> int:
    blocks = driver.scheduler.by_request[name].blocks
    return 0 if blocks is None else sum(len(table.sink_blocks) + len(table.run) for table in blocks.tables)


def run_and_watch(driver: Driver, name: str) -> int:
    """The most blocks that a request holds at any time."""
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        if name in driver.scheduler.by_request:
            most = max(most, held(driver, name))
    driver.check_idle()
    return most


def check_kept(driver: Driver) -> None:
    """Every query of a sequence with a history could read exactly the blocks that its tokens call for."""
    for name, queries in driver.executor.kept.items():
        item = driver.requests[name]
        policy = item.kv_policy
        assert isinstance(policy, AdaptivePolicy | HeavyPolicy)
        tokens = [*item.prompt_token_ids, *driver.tokens[name]]
        expected = kept_blocks(policy, name, tokens, num_prompt_tokens=item.num_prompt_tokens, block=BLOCK)
        for query, blocks in queries.items():
            if query < len(tokens):  # a token that was in flight when the request ended is not known
                upto = {block for block in blocks if block * BLOCK <= query}
                assert upto == expected[query], (name, query)


@pytest.mark.parametrize("policy", WINDOWS, ids=lambda policy: policy.text)
@pytest.mark.parametrize("num_tokens", [1, 4, 7, 8, 9, 16, 17, 60])
def test_a_window_holds_what_it_reads(policy: WindowPolicy, num_tokens: int) -> None:
    one = driver()
    one.add(request("w", range(1, num_tokens + 1), 200, kv_policy=policy))
    most = run_and_watch(one, "w")
    assert len(one.tokens["w"]) == 200
    window = -(-(policy.window - 1) // BLOCK) + 2 if policy.window > 1 else 1
    chunk = -(-min(16, num_tokens) // BLOCK)
    assert most <= -(-policy.sinks // BLOCK) + window + chunk


def test_plans_say_what_rows_read() -> None:
    one = driver(max_num_batched_tokens=64)
    one.add(request("plain", range(6), 2))
    one.add(request("window", range(7), 2, kv_policy=WINDOWS[2]))
    one.add(request("heavy", range(8), 2, kv_policy=HISTORIES[3]))
    plan = one.schedule()
    assert plan is not None
    assert plan.row_window == [0, 7, WHOLE_TABLE]
    assert plan.row_sinks == [0, 5, 4]
    assert plan.wants_mass == [0, 0, 1]
    assert plan.measure == [0, 0, 0]
    one.receive()
    one.run()
    one.add(request("alone", range(6), 1))
    plan = one.schedule()
    assert plan is not None
    assert plan.row_window == plan.row_sinks == plan.wants_mass == plan.measure == []


def test_a_window_s_prefix_is_found_by_the_same_policy_alone() -> None:
    prompt = range(100, 140)
    one = driver()
    hits = []
    for name, policy in (
        ("a", WINDOWS[2]),
        ("b", WindowPolicy(sinks=5, window=7)),
        ("c", WINDOWS[0]),
        ("d", None),
        ("e", None),
        ("f", WINDOWS[0]),
    ):
        one.add(request(name, prompt, 1, kv_policy=policy))
        one.run()
        hits.append(one.outputs[name][0].num_cached_tokens)
    assert hits == [0, 36, 0, 0, 36, 36]
    one.check_idle()


def test_a_window_continues_a_conversation_from_its_checkpoint() -> None:
    """The answer's end is a checkpoint: its sinks and its window are kept, and no more of the chain."""
    one = driver()
    one.add(request("first", range(50), 30, kv_policy=WINDOWS[2]))
    one.run()
    group = one.scheduler.stats().groups[0]
    assert group.pinned_blocks <= 2 * (2 + 2)  # at the prompt's and at the answer's end
    tokens = [*range(50), *one.tokens["first"]]
    one.add(request("second", [*tokens, 7, 8, 9], 4, kv_policy=WINDOWS[2]))
    one.run()
    assert one.outputs["second"][0].num_cached_tokens == 76
    one.check_idle()


def test_requests_with_one_window_wait_for_each_other_s_prefix() -> None:
    one = driver(min_shared_tokens=1, max_num_batched_tokens=16)
    for i in range(4):
        one.add(request(f"w{i}", range(60), 2, kv_policy=WINDOWS[3]))
    one.run()
    assert one.num_followed > 0
    assert one.executor.num_computed < 60 + 4 * 8
    one.check_idle()


@pytest.mark.parametrize("policy", HISTORIES, ids=lambda policy: policy.text)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("num_prompt", [1, 16, 17, 61])
def test_a_history_keeps_the_same_blocks_however_its_tokens_are_cut(
    policy: AdaptivePolicy | HeavyPolicy, steps_in_flight: int, num_prompt: int
) -> None:
    most = {}
    for num_batched in (1, 3, 16, 64):
        one = driver(max_num_batched_tokens=num_batched, steps_in_flight=steps_in_flight)
        one.add(request("h", range(num_prompt), 34, kv_policy=policy))
        most[num_batched] = run_and_watch(one, "h")
        check_kept(one)
        assert len(one.executor.kept["h"]) >= num_prompt + 33
    bound = policy.budget if isinstance(policy, HeavyPolicy) else -(-policy.sinks // BLOCK) * BLOCK + policy.max_window
    assert max(most.values()) <= bound // BLOCK


def test_a_history_is_not_published() -> None:
    one = driver()
    for name in ("a", "b"):
        one.add(request(name, range(40), 4, kv_policy=HISTORIES[3]))
        one.run()
        assert one.outputs[name][0].num_cached_tokens == 0
        assert not any(one.scheduler.cache.index.groups)
    assert one.scheduler.stats().outcome_tokens == {"missed_policy": 80}
    one.check_idle()


@pytest.mark.parametrize("policy", [WINDOWS[2], HISTORIES[0], HISTORIES[4]], ids=lambda policy: policy.text)
def test_a_measured_request_keeps_what_the_policy_drops(policy: KvPolicy) -> None:
    one = driver(num_pages=100)
    one.add(request("m", range(20), 60, kv_policy=policy, kv_quality=True))
    one.run()
    check_kept(one)
    measured = [output.quality for output in one.outputs["m"] if output.quality is not None]
    assert len(measured) == 5  # at positions 26, 39, 52, 65 and 78
    one.check_idle()


def test_streams_past_the_model_s_length() -> None:
    """Window and adaptive policies go on, with what they keep; others and those without max_tokens end at the length."""
    for policy in (WINDOWS[2], HISTORIES[0]):
        one = driver(num_pages=12, max_model_len=40)
        one.add(request("s", range(60), 300, kv_policy=policy))
        run_and_watch(one, "s")
        assert len(one.tokens["s"]) == 300
        check_kept(one)
    one = driver(max_model_len=40)
    with pytest.raises(PromptTooLong, match="model's length is 40"):
        one.add(request("heavy", range(60), 4, kv_policy=HISTORIES[3]))
    with pytest.raises(PromptTooLong, match="model's length is 40"):
        one.add(request("open", range(60), None, kv_policy=WINDOWS[2]))
    with pytest.raises(PromptTooLong, match="model's length is 40"):
        one.add(request("measured", range(60), 4, kv_policy=WINDOWS[2], kv_quality=True))
    one.add(request("short", range(20), None, kv_policy=WINDOWS[2]))
    one.run()
    assert len(one.tokens["short"]) == 20


def test_a_pool_admits_by_what_policies_keep() -> None:
    """A pool too small for the whole length takes it under a policy, and no policy that keeps more than the pool."""
    small = driver(num_pages=3)
    blocks = sum(small.scheduler.cache.arena.blocks_per_page) * 3
    with pytest.raises(RequestTooLarge, match="pages of KV cache"):
        small.add(request("all", range(60), 10))
    tokens = (blocks - 1) * BLOCK
    small.add(request("window", range(60), 10, kv_policy=WindowPolicy(sinks=0, window=tokens - BLOCK)))
    small.run()
    small.add(request("heavy", range(60), 10, kv_policy=HeavyPolicy(sinks=4, budget=tokens)))
    small.run()
    with pytest.raises(RequestTooLarge, match="pages of KV cache"):
        small.add(request("quality", range(60), 10, kv_policy=WINDOWS[0], kv_quality=True))
    with pytest.raises(RequestTooLarge, match="pages of KV cache"):
        small.add(request("more", range(90), 5, kv_policy=HeavyPolicy(sinks=4, budget=tokens + 2 * BLOCK)))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (WindowPolicy(sinks=4, window=93), "kv_policy.window is 93 and kv_policy.sinks 4.*up to 96 tokens"),
        (AdaptivePolicy(sinks=4, min_window=1, max_window=93, threshold=0.1), "kv_policy.max_window is 93"),
        (AdaptivePolicy(sinks=4, min_window=1, max_window=7, threshold=0.1), "kv_policy.max_window is 7.*at least 8"),
        (HeavyPolicy(sinks=4, budget=97), "kv_policy.budget is 97"),
        (
            HeavyPolicy(sinks=5, budget=19),
            "kv_policy.budget is 19; with 5 sinks and KV blocks of 4 tokens.*at least 20",
        ),
    ],
)
def test_policies_that_make_no_sense_are_refused(policy: KvPolicy, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        driver().add(request("r", range(9), 4, kv_policy=policy))


def test_models_with_other_groups_take_no_policy() -> None:
    one = Driver(layout(("full", "window"), num_pages=30))
    with pytest.raises(RequestError, match=r"'window' needs a model .* the KV cache groups window;") as error:
        one.add(request("r", range(9), 4, kv_policy=WINDOWS[0]))
    assert error.value.param == "kv_policy"
    with pytest.raises(RequestError, match="the request has none") as error:
        one.add(request("r", range(9), 4, kv_quality=True))
    assert error.value.param == "kv_quality"


def random_run(seed: int, *, steps_in_flight: int, policies: Sequence[KvPolicy | None]) -> Driver:
    rng = random.Random(seed)
    one = driver(
        num_pages=rng.choice([9, 10, 12, 16, 40]),
        host_pages=rng.choice([0, 0, 3, 40]),
        preemption_mode=rng.choice(["auto", "swap", "recompute"]),
        steps_in_flight=steps_in_flight,
        policy=rng.choice(["fcfs", "priority"]),
        caching=rng.random() < 0.9,
        max_num_seqs=rng.choice([2, 5, 8]),
        max_num_batched_tokens=rng.choice([3, 16, 64]),
        max_model_len=80,
        min_shared_tokens=rng.choice([1, BLOCK, 20]),
    )
    if one.scheduler.cache.tiers.host.exists:
        one.scheduler.cache.changes.set_rates(LoadRates(1_000, (1,)))
    prefixes = [[rng.randrange(50) for _ in range(70)] for _ in range(2)]
    waiting = [f"r{i}" for i in range(12)]
    while waiting or one.scheduler.has_work:
        if waiting and rng.random() < 0.5:
            name, policy = waiting.pop(), rng.choice(policies)
            prompt = rng.choice(prefixes)[: rng.randrange(1, 70)] + [rng.randrange(50) for _ in range(rng.randrange(6))]
            resumed = tuple(rng.randrange(50) for _ in range(rng.choice([0, 0, 5, 13])))
            fields = dict(priority=rng.randrange(3), kv_policy=policy, kv_quality=bool(policy) and rng.random() < 0.2)
            try:
                one.add(request(name, prompt, len(resumed) + rng.randrange(1, 60), resumed=resumed, **fields))
            except (RequestTooLarge, PromptTooLong):
                one.requests.pop(name, None)
        if rng.random() < 0.02 and one.requests:
            one.abort(rng.choice(sorted(one.requests)))
        if rng.random() < 0.01:
            one.fail()
        if rng.random() < 0.5:
            one.schedule()
        elif one.in_flight:
            one.receive()
        else:
            one.step()
        one.check()
    assert sorted(one.finished) == sorted(one.requests)
    check_kept(one)
    one.check_idle()
    return one


@settings(max_examples=num_examples(daily=20, exhaustive=120), deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 2]),
    st.sampled_from([(None, *WINDOWS, *HISTORIES), (None, *WINDOWS[:2]), WINDOWS, (None, *HISTORIES), HISTORIES[3:]]),
)
def test_random_requests_with_policies(seed: int, steps_in_flight: int, policies: tuple[KvPolicy | None, ...]) -> None:
    random_run(seed, steps_in_flight=steps_in_flight, policies=policies)


def test_a_preempted_history_is_computed_again_with_equal_decisions() -> None:
    one = driver(num_pages=10, max_num_seqs=4)
    for i in range(4):
        one.add(request(f"h{i}", range(i, 50 + i), 30, kv_policy=HISTORIES[5]))
    one.run()
    assert one.scheduler.work.preemptions["recompute"]
    check_kept(one)
    one.check_idle()


def test_prompt_logprobs_work_with_a_policy() -> None:
    for policy in (WINDOWS[1], HISTORIES[2]):
        one = driver()
        params = SamplingParams(max_tokens=3, prompt_logprobs=0)
        one.add(request("p", range(30), params=params, kv_policy=policy))
        one.run()
        logprobs = one.outputs["p"][0].prompt_logprobs
        assert logprobs is not None
        assert len(logprobs) == 29


def swapped(policies: Sequence[KvPolicy], *, mode: str, steps_in_flight: int, num_pages: int, **fields: Any) -> Driver:
    """Six requests in a small pool beside a host tier; copying a block costs as much as computing 1,000 tokens."""
    one = driver(num_pages=num_pages, host_pages=60, preemption_mode=mode, steps_in_flight=steps_in_flight)
    one.scheduler.cache.changes.set_rates(LoadRates(1, (1_000,)))
    for i in range(6):
        one.add(request(f"r{i}", range(i, 8 + i), 60, kv_policy=policies[i % len(policies)], **fields))
    one.run()
    assert all(len(one.tokens[f"r{i}"]) == 60 for i in range(6))
    check_kept(one)
    one.check_idle()
    return one


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("policies", [WINDOWS[3:], HISTORIES], ids=["windows", "histories"])
def test_policies_are_preempted_by_swap(policies: Sequence[KvPolicy], steps_in_flight: int) -> None:
    """A swapped sequence comes back with what its policy keeps, however many gaps its table has, and computes nothing again."""
    one = swapped(policies, mode="swap", steps_in_flight=steps_in_flight, num_pages=5)
    assert one.scheduler.work.preemptions["swap"] > 3
    assert one.scheduler.work.preemptions["recompute"] == one.scheduler.work.recompute_tokens == 0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("policies", [WINDOWS[3:], HISTORIES], ids=["windows", "histories"])
def test_a_measured_request_is_swapped_with_what_its_policy_dropped(
    policies: Sequence[KvPolicy], steps_in_flight: int
) -> None:
    """The executor compares each measured token with the keys of everything that the sequence ever had."""
    one = swapped(policies, mode="swap", steps_in_flight=steps_in_flight, num_pages=9, kv_quality=True)
    assert one.scheduler.work.preemptions["swap"] > 3
    assert one.scheduler.work.recompute_tokens == 0
    measured = [output for outputs in one.outputs.values() for output in outputs if output.quality is not None]
    assert len(measured) == 6 * 5


def test_masses_of_a_row_that_is_in_flight_at_a_preemption_count() -> None:
    """With two steps in flight a sequence is preempted while a step computes it; its next decision has that step's masses, too."""
    num_swaps = 0
    for num_pages in range(5, 12):
        one = driver(num_pages=num_pages, host_pages=60, preemption_mode="swap", steps_in_flight=2)
        for i in range(6):
            one.add(request(f"r{i}", range(i, 40 + i), 40, kv_policy=HISTORIES[i]))
        one.run()
        num_swaps += one.scheduler.work.preemptions["swap"]
        check_kept(one)
        one.check_idle()
    assert num_swaps > 10


def test_auto_swaps_a_history_whatever_copying_costs() -> None:
    """Replayed in other steps, its masses would be rounded otherwise; a window is computed again where that is cheaper."""
    for policies, mode in ((HISTORIES, "swap"), (WINDOWS[3:], "recompute")):
        one = swapped(policies, mode="auto", steps_in_flight=2, num_pages=5)
        assert {mode} == {mode for mode, count in one.scheduler.work.preemptions.items() if count}


def test_a_history_that_finds_no_room_in_the_host_tier_is_computed_again_to_the_same_blocks() -> None:
    one = driver(num_pages=5, host_pages=1, preemption_mode="swap")
    for i in range(6):
        one.add(request(f"r{i}", range(i, 8 + i), 60, kv_policy=HISTORIES[5]))
    one.run()
    assert one.scheduler.work.preemptions["recompute"]
    check_kept(one)
    one.check_idle()


def test_dropped_blocks_of_swapped_requests_stay_counted() -> None:
    one = driver(num_pages=5, host_pages=20, preemption_mode="swap")
    for i in range(6):
        one.add(request(f"r{i}", range(i, 8 + i), 60, kv_policy=HISTORIES[3]))
    counted = 0
    while one.scheduler.has_work:
        one.step()
        dropped = one.scheduler.policy_stats()["heavy"].num_dropped_blocks
        assert dropped >= counted
        counted = dropped
    assert one.scheduler.work.preemptions["swap"]

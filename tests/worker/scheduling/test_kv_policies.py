"""KV policies in the scheduler: what sequences keep, publish and find, whatever runs beside them."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.how_many import num_examples
from tests.worker.scheduling.kept_blocks_model import check_kept
from tests.worker.scheduling.scheduler_driver import BLOCK, Driver, layout, request
from tests.worker.scheduling.test_scheduler_random import random_run
from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, WindowPolicy
from transom_core.contract.kv_policy import MAX_LONG_PROMPT_TOKENS
from transom_core.errors import PromptTooLong, RequestError, RequestTooLarge
from transom_core.kv_cache.load_rates import LoadRates

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


def test_streams_past_the_model_s_length() -> None:
    """Window and adaptive policies go on, with what they keep; others and those without max_tokens end at the length."""
    for policy in (WINDOWS[2], HISTORIES[0]):
        one = driver(num_pages=12, max_model_len=40)
        one.add(request("s", range(60), 300, kv_policy=policy))
        one.run()
        assert len(one.tokens["s"]) == 300
        check_kept(one)
        with pytest.raises(PromptTooLong, match="may have 131072"):
            one.add(request("prompt", range(MAX_LONG_PROMPT_TOKENS + 1), 300, kv_policy=policy))
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


@settings(max_examples=num_examples(daily=12, exhaustive=120))
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 2]),
    st.sampled_from([(None, *WINDOWS, *HISTORIES), (None, *WINDOWS[:2]), WINDOWS, (None, *HISTORIES), HISTORIES[3:]]),
    st.booleans(),
)
def test_random_requests_with_policies(
    seed: int, steps_in_flight: int, policies: tuple[KvPolicy | None, ...], has_host: bool
) -> None:
    """Preempted and swapped sequences keep the same blocks, and those that depend on a history are found by no other."""
    random_run(
        ("full",), seed, steps_in_flight=steps_in_flight, policies=policies, has_host=has_host, prompt_logprobs=0.1
    )


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
@pytest.mark.parametrize("is_measured", [False, True])
def test_policies_are_preempted_by_swap(policies: Sequence[KvPolicy], steps_in_flight: int, is_measured: bool) -> None:
    """A swapped sequence comes back with what its policy keeps, however many gaps its table has, and computes nothing again.

    A measured one comes back with what its policy dropped as well: the executor compares each measured token with all keys.
    """
    num_pages = 9 if is_measured else 5
    one = swapped(policies, mode="swap", steps_in_flight=steps_in_flight, num_pages=num_pages, kv_quality=is_measured)
    assert one.scheduler.work.preemptions["swap"] > 3
    assert one.scheduler.work.preemptions["recompute"] == one.scheduler.work.recompute_tokens == 0
    measured = [output for outputs in one.outputs.values() for output in outputs if output.quality is not None]
    assert len(measured) == 6 * 5 * is_measured


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
    """Replayed in other steps, its masses would be rounded in another way; a window is computed again where that is cheaper."""
    for policies, mode in ((HISTORIES, "swap"), (WINDOWS[3:], "recompute")):
        one = swapped(policies, mode="auto", steps_in_flight=2, num_pages=5)
        assert {mode} == {mode for mode, count in one.scheduler.work.preemptions.items() if count}

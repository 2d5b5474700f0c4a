"""What other caches could hit, on workloads small enough to know the answer."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.retention import Retention
from transom_worker.simulate.bounds import Footprint, hit_bounds
from transom_worker.simulate.workload import Run, SimulatedRequest, TokenSpace

UNIT = 4
WINDOW = GroupSpec(name="window", kind=GroupKind.WINDOW, layers=(0,), block_size=UNIT, window=9)


def footprint(num_tokens: int, *, window_block_bytes: int = 0) -> Footprint:
    """A pool for `num_tokens` tokens of one byte; optionally with a window of 2 to 3 blocks."""
    sliding = ((Retention(WINDOW), window_block_bytes),) if window_block_bytes else ()
    return Footprint(block_tokens=UNIT, pool_bytes=num_tokens, token_bytes=1, sliding=sliding)


def requests(*prompts: Sequence[Run]) -> list[SimulatedRequest]:
    """Requests with answers of one token, which is never computed."""
    space = TokenSpace()
    space.take(1_000_000)
    return [SimulatedRequest(prompt=tuple(prompt), answer=space.take(1)) for prompt in prompts]


def test_round_robin_defeats_recency_but_not_the_clairvoyant() -> None:
    space = TokenSpace()
    prompts = [[space.take(41)] for _ in range(4)] * 3
    bounds = hit_bounds(requests(*prompts), footprint(3 * 41))
    assert bounds["infinite"] == 8 * 40
    assert bounds["full_alone_lru"] == 0
    # beside the one that runs two are kept: each lap one of four gives way, in parts
    assert 8 * 40 * 0.6 < bounds["full_alone_clairvoyant"] == bounds["clairvoyant"] < 8 * 40


def test_a_run_shared_behind_another_prefix_is_no_hit() -> None:
    space = TokenSpace()
    a, b, shared = space.take(8), space.take(8), space.take(16)
    assert hit_bounds(requests([a, shared], [b, shared]), footprint(1000))["infinite"] == 0
    assert hit_bounds(requests([a, shared], [a, shared.cut(6), b]), footprint(1000))["infinite"] == 12


def test_answers_are_hit_but_for_their_last_token() -> None:
    space = TokenSpace()
    first = SimulatedRequest(prompt=(space.take(8),), answer=space.take(8))
    second = SimulatedRequest(prompt=(*first.prompt, first.answer, space.take(8)), answer=space.take(1))
    assert hit_bounds([first, second], footprint(1000))["infinite"] == 12


def test_windows_cost_the_clairvoyant_a_checkpoint_each() -> None:
    space = TokenSpace()
    prompts = [[space.take(41)] for _ in range(4)] * 2
    roomy = 4 * 41 + 5 * 3 * 10
    assert hit_bounds(requests(*prompts), footprint(roomy, window_block_bytes=10))["clairvoyant"] == 4 * 40
    tight = hit_bounds(requests(*prompts), footprint(4 * 41 + 50, window_block_bytes=10))
    assert tight["full_alone_clairvoyant"] == 4 * 40
    assert 0 < tight["clairvoyant"] < 4 * 40


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=12),
    st.integers(20, 120),
)
def test_bounds_are_ordered_and_those_of_an_endless_pool_equal(paths: list[list[int]], num_tokens: int) -> None:
    runs = [Run(at * 100, 9 + at) for at in range(4)]
    workload = requests(*([runs[at] for at in path] for path in paths))
    bounds = hit_bounds(workload, footprint(num_tokens))
    assert bounds["clairvoyant"] == bounds["full_alone_clairvoyant"]
    assert max(bounds.values()) == bounds["infinite"]
    endless = hit_bounds(workload, footprint(10**9, window_block_bytes=3))
    assert set(endless.values()) == {bounds["infinite"]}


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=2, max_size=14),
    st.lists(st.integers(1, 4), min_size=5, max_size=5),
    st.integers(0, 12),
)
def test_the_clairvoyant_is_never_worse_than_recency(
    paths: list[list[int]], sizes: list[int], spare_units: int
) -> None:
    runs = [Run(at * 100, UNIT * size) for at, size in enumerate(sizes)]
    workload = requests(*([runs[at] for at in path] for path in paths))
    longest = max(request.num_prompt_tokens for request in workload)
    bounds = hit_bounds(workload, footprint(longest + UNIT * spare_units))
    assert bounds["full_alone_lru"] <= bounds["full_alone_clairvoyant"] <= bounds["infinite"]

"""Where requests go, by what is known of each worker."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, strategies as st

from transom_cluster.routing.policy import (
    NEARLY,
    POLICIES,
    Candidate,
    Candidates,
    TieBreak,
    choose,
    expected_costs_s,
    worker_seed,
)

LENGTH = 2_000


def candidate(worker_id: str, **changes: object) -> Candidate:
    fields: dict[str, object] = {"num_to_compute": LENGTH, "max_num_seqs": 16} | changes
    return Candidate(worker_id=worker_id, **fields)  # type: ignore[arg-type]


def columns(candidates: Sequence[Candidate]) -> Candidates:
    """What the policies see of these candidates."""
    return Candidates(
        num_to_compute=np.array([one.num_to_compute for one in candidates], np.int64),
        extra_s=np.zeros(len(candidates)),
        facts=np.array([one.facts for one in candidates], np.float64).T,
        seeds=np.array([worker_seed(one.worker_id) for one in candidates], np.uint64),
    )


def tie_breaks(count: int, seed: int = 0) -> list[TieBreak]:
    rng = random.Random(seed)
    return [TieBreak(turn=turn, draw=rng.random()) for turn in range(count)]


def by_policy(policy: str, candidates: list[Candidate], tie_break: TieBreak) -> str:
    """The worker that a policy chooses."""
    return candidates[POLICIES[policy](columns(candidates), tie_break).position].worker_id  # type: ignore[index]


def with_reason(policy: str, candidates: list[Candidate], tie_break: TieBreak) -> tuple[Candidate, str]:
    found = choose(policy, columns(candidates), tie_break)  # type: ignore[arg-type]
    return candidates[found.position], found.reason


def chosen(candidates: list[Candidate]) -> str:
    """What kv chooses, whatever the random draw."""
    names = {by_policy("kv", candidates, tie_break) for tie_break in tie_breaks(50)}
    assert len(names) == 1
    return names.pop()


def test_kv_goes_elsewhere_when_the_queue_costs_more_than_the_hit_saves() -> None:
    hot = candidate("a", num_to_compute=100, queue_tokens=1_000)
    assert chosen([hot, candidate("b")]) == "a"
    assert chosen([replace(hot, queue_tokens=3_000), candidate("b")]) == "b"


def test_kv_goes_elsewhere_when_there_is_no_seat_or_no_room() -> None:
    hot = candidate("a", num_to_compute=100)
    assert chosen([replace(hot, num_requests=8), candidate("b", num_requests=8)]) == "a"
    assert chosen([replace(hot, num_requests=24), candidate("b", num_requests=8)]) == "b"
    assert chosen([replace(hot, used_share=0.5), candidate("b", used_share=0.5)]) == "a"
    assert chosen([replace(hot, used_share=0.98), candidate("b", used_share=0.5)]) == "b"


def test_kv_prefers_a_machine_that_is_faster_by_far_but_not_by_a_little() -> None:
    fast = candidate("b", prefill_tokens_per_s=50_000, num_to_compute=4_000)
    assert chosen([candidate("a", prefill_tokens_per_s=5_000), fast]) == "b"
    similar = [candidate(name, prefill_tokens_per_s=rate) for name, rate in (("a", 900), ("b", 1000), ("c", 1200))]
    assert {by_policy("kv", similar, tie_break) for tie_break in tie_breaks(300)} == {"a", "b", "c"}
    assert chosen([replace(similar[0], num_to_compute=100), *similar[1:]]) == "a"


def test_a_worker_without_a_measured_rate_counts_as_the_typical_one() -> None:
    known = candidate("a", prefill_tokens_per_s=800)
    assert chosen([known, candidate("b", num_to_compute=1_500)]) == "b"
    assert chosen([known, candidate("b", num_to_compute=2_500)]) == "a"


def test_a_choice_says_why() -> None:
    tie_break = TieBreak(turn=1, draw=0.5)
    hot, cold = candidate("a", num_to_compute=100), candidate("b")
    busy = candidate("c", queue_tokens=9_000, num_requests=9)
    at_home = replace(tie_break, home=b"x" * 32)
    assert with_reason("kv", [busy], tie_break) == (busy, "only_one")
    assert with_reason("kv", [hot, cold, busy], at_home) == (hot, "longest_hit")
    assert with_reason("kv", [replace(hot, queue_tokens=9_000), cold], at_home) == (cold, "least_loaded")
    assert with_reason("kv", [cold, busy], at_home) == (cold, "least_loaded")
    assert with_reason("kv", [cold, replace(cold, worker_id="d"), busy], at_home)[1] == "home"
    assert with_reason("kv", [cold, replace(cold, worker_id="d"), busy], tie_break)[1] == "random"
    assert with_reason("round_robin", [hot, cold], tie_break) == (cold, "turn")


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        worker_id=st.just(""),
        num_to_compute=st.integers(0, 10**6),
        queue_tokens=st.integers(0, 10**7),
        num_requests=st.integers(0, 2000),
        max_num_seqs=st.integers(1, 1024),
        used_share=st.floats(0, 1),
        prefill_tokens_per_s=st.just(0.0) | st.floats(1, 10**6),
        decode_step_s=st.just(0.0) | st.floats(1e-4, 10),
    ),
    min_size=1,
    max_size=8,
).map(lambda found: [replace(one, worker_id=str(at)) for at, one in enumerate(found)])
CHANCES = st.builds(
    TieBreak, turn=st.integers(0, 10**9), draw=st.floats(0, 1, exclude_max=True), home=st.sampled_from([b"", b"x" * 32])
)


@given(
    CANDIDATES,
    st.sampled_from(("num_to_compute", "queue_tokens", "num_requests")),
    st.integers(0, 10**6),
    st.floats(1, 10**6),
    st.floats(1e-4, 10),
)
def test_a_cost_never_falls_when_tokens_or_queue_grow(
    candidates: list[Candidate], field: str, more: int, rate: float, step_s: float
) -> None:
    before = replace(candidates[0], prefill_tokens_per_s=rate, decode_step_s=step_s)
    after = replace(before, **{field: getattr(before, field) + more})
    fuller = replace(before, used_share=min(1.0, before.used_share + more / 10**6))
    cost_before, cost_after, cost_fuller = expected_costs_s(columns([before, after, fuller]))
    assert cost_after >= cost_before >= 0
    assert cost_fuller >= cost_before


@given(CANDIDATES, CHANCES)
def test_kv_never_takes_what_costs_much_more_than_the_best(candidates: list[Candidate], tie_break: TieBreak) -> None:
    alike = [replace(one, prefill_tokens_per_s=1000.0, decode_step_s=0.02) for one in candidates]
    costs = dict(zip([one.worker_id for one in alike], expected_costs_s(columns(alike)), strict=True))
    assert costs[by_policy("kv", alike, tie_break)] <= min(costs.values()) * (1 + NEARLY)


def test_among_nearly_equals_a_prompt_has_a_home_and_prompts_spread_over_all() -> None:
    candidates = [candidate(name, queue_tokens=at * 10) for at, name in enumerate("abc")]
    homes = [bytes([at]) * 32 for at in range(150)]
    by_home = {home: {by_policy("kv", candidates, replace(c, home=home)) for c in tie_breaks(5)} for home in homes}
    assert all(len(chosen) == 1 for chosen in by_home.values())
    counts = Counter(name for chosen in by_home.values() for name in chosen)
    assert all(30 <= counts[name] <= 70 for name in "abc")
    without = [one for one in candidates if one.worker_id != "b"]  # gone: only its own prompts move
    for home, chosen in by_home.items():
        assert chosen in ({"b"}, {by_policy("kv", without, TieBreak(turn=0, draw=0.5, home=home))})

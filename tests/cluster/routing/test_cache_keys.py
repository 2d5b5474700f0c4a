"""Requests with one `prompt_cache_key` stay together, as long as that costs little."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cluster.routing.test_placer import PROMPT, WORKERS, load, placer, request, whole
from tests.cluster.routing.test_policy import candidate, columns
from transom_cluster.routing.cache_keys import key_digest
from transom_cluster.routing.placer import PlacementDecision, Placer
from transom_cluster.routing.policy import KEY_TOKENS, REQUEST_TOKENS, Candidate, TieBreak, choose
from transom_core.contract import WorkerMessage


def prompt(number: int, num_tokens: int = 500) -> tuple[int, ...]:
    """Prompts without a common block."""
    return tuple(range(number * num_tokens, (number + 1) * num_tokens))


def place(made: Placer, name: str, number: int, key: str | None = "k", **fields: object) -> PlacementDecision:
    return made.place(request(name, prompt(number), prompt_cache_key=key, **fields), WORKERS)


def choice(candidates: list[Candidate], key: int, policy: str = "kv") -> tuple[str, str]:
    tie_break = TieBreak(turn=0, draw=0.99, key_position=key)
    found = choose(policy, columns(candidates), tie_break)  # type: ignore[arg-type]
    return candidates[found.position].worker_id, found.reason


def test_requests_with_one_key_go_to_one_worker() -> None:
    made = placer()
    first = place(made, "r0", 0)
    made.ended("r0")
    assert first.reason == "home"
    for number in range(1, 20):
        decision = place(made, f"r{number}", number)
        made.ended(f"r{number}")
        assert (decision.worker_id, decision.reason) == (first.worker_id, "cache_key")


def test_a_longer_hit_is_better_than_the_key() -> None:
    made = placer(cached={"b": whole(PROMPT)})
    key = next(f"k{i}" for i in range(100) if place(made, f"r{i}", i, key=f"k{i}").worker_id != "b")
    for i in range(100):
        made.ended(f"r{i}")
    decision = made.place(request("hit", PROMPT, prompt_cache_key=key), WORKERS)
    assert (decision.worker_id, decision.reason) == ("b", "longest_hit")
    assert place(made, "next", 3, key=key).worker_id == "b"  # where the key's last request is


def test_a_key_gathers_no_crowd() -> None:
    """A worker gets at most a few requests more than the others, however many have its key."""
    made = placer()
    counts = Counter(place(made, f"r{number}", number).worker_id for number in range(60))
    assert max(counts.values()) - min(counts.values()) <= 1 + KEY_TOKENS // REQUEST_TOKENS + 1


def test_the_key_is_worth_a_fixed_number_of_tokens() -> None:
    near = [candidate("a", queue_tokens=KEY_TOKENS), candidate("b")]
    far = [candidate("a", queue_tokens=2 * KEY_TOKENS), candidate("b")]
    assert choice(near, key=0) == ("a", "cache_key")
    assert choice(far, key=0) == ("b", "least_loaded")
    assert choice([candidate("a", num_to_compute=1000), candidate("b", num_to_compute=999)], key=0)[1] != "cache_key"


def test_other_policies() -> None:
    equal = [candidate(name) for name in "abc"]
    assert choice(equal, key=1, policy="least_tokens") == ("b", "cache_key")
    busy = [candidate("a"), candidate("b", queue_tokens=1), candidate("c")]
    assert choice(busy, key=1, policy="least_tokens")[0] != "b"
    for policy in ("round_robin", "power_of_two"):
        assert choice(equal, key=1, policy=policy) == choice(equal, key=2, policy=policy)


def test_a_worker_that_left_has_no_keys() -> None:
    made = placer()
    first = place(made, "r0", 0).worker_id
    made.remove_worker(first)
    others = [name for name in WORKERS if name != first]
    second = made.place(request("r1", prompt(1), prompt_cache_key="k"), others)
    assert second.worker_id in others
    made.ended("r1")
    third = made.place(request("r2", prompt(2), prompt_cache_key="k"), others)
    assert (third.worker_id, third.reason) == (second.worker_id, "cache_key")


def test_a_full_pool_is_left() -> None:
    made = placer()
    first = place(made, "r0", 0).worker_id
    made.ended("r0")
    assert made.update(first, WorkerMessage(load=load(used_share=1.0, num_running=16)))
    assert place(made, "r1", 1).worker_id != first


def test_short_prompts_of_one_key_have_a_home() -> None:
    """A prompt without a whole hash block has no home of its own; all routers agree on the key's."""
    chosen = {
        placer(seed=seed).place(request("r", (1, 2, 3), prompt_cache_key="k"), WORKERS).worker_id for seed in range(8)
    }
    assert len(chosen) == 1


def test_keys_of_different_salts_differ() -> None:
    one, other = (request("r", prompt_cache_key="k", cache_salt=salt) for salt in ("a", "b"))
    assert key_digest(one) != key_digest(other)
    assert key_digest(request("r")) == b""
    assert key_digest(request("r", prompt_cache_key="")) != b""


@pytest.mark.parametrize("key", ["k" * 1024, "\ud800", "\u00fc"])
def test_any_text_is_a_key(key: str) -> None:
    assert len(key_digest(request("r", prompt_cache_key=key))) == 16

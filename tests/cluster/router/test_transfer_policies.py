"""Requests with KV policies on workers between which prefixes move: a window's sinks and window move alone, whatever the prompt's
length, and what depends on a request's history is computed where it decodes. The tokens are those of one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.router.test_failover_engines import Whole, answers_of
from tests.cluster.router.test_transfer_engines import PROMPT, Cluster, at_worker, check, evict, fetching, requests_of
from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, Request, WindowPolicy
from transom_worker.engine.step_rates import StepRates

WINDOW = WindowPolicy(sinks=4, window=40)
MOST_BLOCKS = 1 + 3 + 1  # of 16 tokens: of the sinks, and of 39 tokens that begin within a block
POLICIES: dict[str, KvPolicy] = {
    "window": WINDOW,
    "no sinks": WindowPolicy(sinks=0, window=90),
    "adaptive": AdaptivePolicy(sinks=4, min_window=32, max_window=96, threshold=0.01),
    "heavy": HeavyPolicy(sinks=4, budget=96),
}


def with_policies() -> list[Request]:
    """Two requests for each policy, greedy and seeded, and a measured one; each has a prompt of its own."""
    made = [
        replace(one, request_id=f"{name}-{one.choice_index}", kv_policy=policy)
        for name, policy in POLICIES.items()
        for one in requests_of()[:2]
    ]
    made.append(replace(made[0], request_id="measured", kv_quality=True))
    return [replace(one, prompt_token_ids=(500 + i, *PROMPT[1:])) for i, one in enumerate(made)]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[Whole]:
    """The answers of one worker."""
    cluster = Cluster(tiny_model, {}, layers={})

    async def run() -> list[Whole]:
        async with cluster.router() as router:
            return await answers_of(router, with_policies())

    try:
        return asyncio.run(run())
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def split(tiny_model: Path) -> Iterator[Cluster]:
    """A prefill worker and a decode worker."""
    cluster = Cluster(tiny_model, {"role": "prefill"}, {"role": "decode"}, layers={})
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def equal(tiny_model: Path) -> Iterator[Cluster]:
    """Two workers that do both; a short limit for fetches."""
    cluster = Cluster(tiny_model, {}, {"kv_transfer_timeout_s": 0.2}, layers={})
    yield cluster
    cluster.close()


def fetch_of(cluster: Cluster, number: int, request_id: str) -> dict[str, Any] | None:
    """How a request's fetch ended at a worker; None where it fetched nothing."""
    events = cluster.replicas[number].engine.timelines.events_of(request_id)
    return next((one for one in events if one["what"] == "prefix_fetched"), None)


def block_bytes(cluster: Cluster) -> int:
    [group] = cluster.replicas[0].engine.scheduler.cache.layout.groups
    return group.block_bytes


async def test_windows_are_handed_over_and_histories_stay_where_they_decode(
    split: Cluster, alone: list[Whole], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepRates, "prefill_tokens_per_s", 100.0)  # so that each prompt is worth moving
    monkeypatch.setattr(StepRates, "fetch_bytes_per_s", 1e9)
    async with split.router() as router:
        for request, whole in zip(with_policies(), alone, strict=True):
            check(await answers_of(router, [request]), [whole])
            told = fetch_of(split, 1, f"{request.request_id}+1")
            if request.reads_prefix_cache:
                assert told is not None
                assert (told["source"], told["outcome"], told["tokens"]) == ("w0", "fetched", 400)
            else:
                assert told is None
                assert not split.replicas[0].engine.timelines.events_of(request.request_id)
                assert split.replicas[1].engine.timelines.events_of(request.request_id)
            if told is not None and request.kv_policy == WINDOW:
                assert 0 < told["bytes"] <= MOST_BLOCKS * block_bytes(split)
    await split.until_quiet()


@pytest.mark.parametrize("length", [100, 400])
async def test_a_fetched_window_is_a_hit_of_a_bounded_number_of_bytes(
    equal: Cluster, alone: list[Whole], length: int
) -> None:
    source, target = equal.replicas
    for replica in (source, target):
        evict(replica)
    first = with_policies()[0]
    first = replace(first, prompt_token_ids=first.prompt_token_ids[:length])
    expected, _ = await at_worker(source, replace(first, request_id=f"warm-{length}"))
    tokens, usage = await at_worker(target, replace(fetching(first), request_id=f"fetch-{length}"))
    assert tokens == expected
    if length == len(PROMPT):
        assert tokens == alone[0].token_ids
    hit = (length - 1) // 16 * 16
    assert usage.num_fetched_tokens == usage.num_cached_tokens == hit
    told = fetch_of(equal, 1, f"fetch-{length}")
    assert told is not None
    assert (told["outcome"], told["tokens"]) == ("fetched", hit)
    assert 0 < told["bytes"] <= MOST_BLOCKS * block_bytes(equal)
    await equal.until_quiet()


@pytest.mark.parametrize("at", ["open", "read"])
@pytest.mark.parametrize("how", ["dies", "hangs"])
async def test_a_source_that_is_lost_costs_a_recompute(equal: Cluster, alone: list[Whole], at: str, how: str) -> None:
    source, target = equal.replicas
    evict(target)
    first = with_policies()[0]
    await at_worker(source, replace(first, request_id=f"warm-{at}-{how}"))

    def before(name: str) -> Any:
        if name != at:
            return None
        if how == "dies":
            raise ConnectionError("the worker is gone")
        return asyncio.Event().wait()

    equal.peers.before = before
    try:
        tokens, usage = await at_worker(target, replace(fetching(first), request_id=f"fetch-{at}-{how}"))
    finally:
        equal.peers.before = lambda _: None
    assert tokens == alone[0].token_ids
    assert usage.num_cached_tokens == usage.num_fetched_tokens == 0
    await equal.until_quiet()


async def test_a_policys_prefix_serves_no_other_policy(equal: Cluster) -> None:
    """The source has the prompt under a window; requests without a policy, or under another one, find nothing there."""
    source, target = equal.replicas
    for replica in (source, target):
        evict(replica)
    first = requests_of()[0]
    await at_worker(source, replace(first, request_id="warm-other", kv_policy=WINDOW))
    for name, policy in (("none", None), ("other", WindowPolicy(sinks=4, window=41))):
        asked = replace(fetching(first), request_id=f"fetch-{name}", kv_policy=policy)
        _, usage = await at_worker(target, asked)
        assert usage.num_fetched_tokens == 0
        told = fetch_of(equal, 1, f"fetch-{name}")
        assert told is not None
        assert told["outcome"] == "not_found"
    await equal.until_quiet()

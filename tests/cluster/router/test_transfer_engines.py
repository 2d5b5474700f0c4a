"""Two workers with real engines of a hybrid model: prefixes move between them, and the tokens are those of one worker alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import until
from tests.cluster.router.mortal_workers import Mortal, routed
from tests.cluster.router.test_failover_engines import Whole, answers_of
from transom_cluster.router.router import Router
from transom_core.contract import PrefixSource, Request, SamplingParams
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer, PrefixQuery
from transom_core.contract.prefix_peers import Bytes
from transom_core.settings.settings import Settings
from transom_worker.replica import WorkerReplica

PROMPT = tuple(range(5, 405))
NUM_TOKENS = 12
HYBRID = {"window": 40, "window_pattern": "SF", "sinks": 4}

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "logprobs": 0},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "stop": {"temperature": 0.0, "stop": ["zzzz"]},
    "prompt log-probabilities": {"temperature": 0.0, "prompt_logprobs": 1},
}


class LocalPeers:
    """The workers of this process by the routers' ids; `before` is called before each call, by its name."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerReplica] = {}
        self.before: Callable[[str], Any] = lambda _: None

    async def open_export(self, worker: str, query: PrefixQuery) -> PrefixOffer | str:
        await self._called("open")
        return await self.workers[worker].open_export(query)

    async def read_export(self, worker: str, export_id: str, blocks: BlockRange) -> list[Bytes]:
        await self._called("read")
        return await self.workers[worker].read_export(export_id, blocks)

    async def close_export(self, worker: str, export_id: str) -> None:
        await self._called("close")
        await self.workers[worker].close_export(export_id)

    async def _called(self, name: str) -> None:
        if (waits := self.before(name)) is not None:
            await waits


class Cluster:
    """A worker for each group of settings, with what is left of them at the end."""

    def __init__(self, model: Path, *groups: dict[str, Any], layers: dict[str, Any] = HYBRID) -> None:
        self.model, self.peers = model, LocalPeers()
        self.replicas = []
        for number, group in enumerate(groups):
            values = {
                "model": str(model),
                "kv_cache_memory_bytes": "8MiB",
                "swap_space": "8MiB",
                "max_num_seqs": 8,
                "dtype": "float32",
                **layers,
                **group,
            }
            config = Settings.parse(**values).engine_config()
            replica = WorkerReplica(config, "tiny", f"w{number}", peers=self.peers)
            self.peers.workers[f"w{number}"] = replica
            self.replicas.append(replica)

    def router(self, **config: Any) -> AbstractAsyncContextManager[Router]:
        workers = [Mortal(replica) for replica in self.replicas]
        return routed(self.model, *workers, **{"routing_policy": "kv", **config})

    async def until_quiet(self) -> None:
        """Wait until no worker has anything of a request or a transfer."""
        for replica in self.replicas:
            assert replica.transfer is not None
            transfer = replica.transfer
            await until(lambda replica=replica: not replica.engine.requests and not replica.num_requests)  # type: ignore[misc]
            await until(lambda t=transfer: not len(t.exports) and not len(t.fetches or ()))  # type: ignore[misc]
            await replica._on_engine(lambda: None)
            cache = replica.engine.scheduler.cache
            assert not any(group.active_blocks for group in replica.engine.scheduler.stats().groups)
            assert not cache.tiers.exports.reads_device
            assert not cache.tiers.imports.opened

    def outcomes(self, number: int) -> dict[tuple[str, str], float]:
        """What became of a worker's transfers, by direction and outcome."""
        registry = self.replicas[number].engine.metrics.registry
        samples = [one for family in registry.collect() for one in family.samples]
        counts = [one for one in samples if one.name == "transom_kv_transfers_total" and one.value]
        return {(one.labels["direction"], one.labels["outcome"]): one.value for one in counts}

    def close(self) -> None:
        for replica in self.replicas:
            replica.shutdown()


def requests_of(prompt: tuple[int, ...] = PROMPT, **fields: Any) -> list[Request]:
    return [
        Request(
            request_id=f"case-{i}",
            prompt_token_ids=prompt,
            params=SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **params}),
            seed=1234 + i,
            choice_index=i,
            **fields,
        )
        for i, params in enumerate(CASES.values())
    ]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[Whole]:
    """The answers of one worker."""
    cluster = Cluster(tiny_model, {})

    async def run() -> list[Whole]:
        async with cluster.router() as router:
            return await answers_of(router, requests_of())

    try:
        return asyncio.run(run())
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def split(tiny_model: Path) -> Iterator[Cluster]:
    """A prefill worker and a decode worker."""
    cluster = Cluster(tiny_model, {"role": "prefill"}, {"role": "decode", "kv_cache_memory_bytes": "6MiB"})
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def equal(tiny_model: Path) -> Iterator[Cluster]:
    """Two workers that do both; a short limit for fetches."""
    cluster = Cluster(tiny_model, {}, {"kv_transfer_timeout_s": 0.2})
    yield cluster
    cluster.close()


def check(got: list[Whole], expected: list[Whole]) -> None:
    for one, whole in zip(got, expected, strict=True):
        assert one.token_ids == whole.token_ids
        assert one.text == whole.text
        assert one.ends == whole.ends
        assert one.prompt_logprobs == whole.prompt_logprobs
        assert [p.chosen.token_id for p in one.logprobs] == [p.chosen.token_id for p in whole.logprobs]


def evict(replica: WorkerReplica) -> None:
    replica._thread.call(replica.engine.scheduler.cache.evict_all).result()


async def test_prefill_and_decode_apart_give_the_tokens_of_one_worker(split: Cluster, alone: list[Whole]) -> None:
    for replica in split.replicas:
        evict(replica)
        replica.engine._rates._prefill_tokens, replica.engine._rates._prefill_s = 100.0, 1.0  # a prompt is worth moving
    async with split.router() as router:
        *moved, last = requests_of()
        got = await answers_of(router, moved)
        got += await answers_of(router, [last])  # a request for prompt log-probabilities does not move
    check(got, alone)
    await split.until_quiet()
    into, out = split.outcomes(1), split.outcomes(0)
    assert into["in", "fetched"] >= 1
    assert out["out", "read"] >= 1
    told = split.replicas[1].engine.timelines.events_of("case-0+1")
    [fetched] = [event for event in told if event["what"] == "prefix_fetched"]
    assert fetched["source"] == "w0"
    assert fetched["outcome"] in ("fetched", "present")


def fetching(request: Request) -> Request:
    return replace(request, prefix_source=PrefixSource(worker="w0", num_tokens=384))


async def at_worker(replica: WorkerReplica, request: Request) -> tuple[list[int], Any]:
    """The tokens of one request that a worker gets without a router, and its usage."""
    tokens: list[int] = []
    usage = None
    stream = replica.open_stream("direct")
    await anext(stream)
    assert await replica.submit("direct", [request]) == [None]
    async with contextlib.aclosing(stream):
        async for message in stream:
            for event in message.events:
                assert event.error is None
                tokens += event.token_ids
                usage = event.usage or usage
                if event.finish_reason is not None:
                    return tokens, usage
    raise AssertionError("the stream has ended")


async def test_a_fetched_prefix_is_a_hit_of_live_blocks(equal: Cluster, alone: list[Whole]) -> None:
    source, target = equal.replicas
    for replica in (source, target):
        evict(replica)
    first = requests_of()[0]
    await at_worker(source, replace(first, request_id="warm"))
    tokens, usage = await at_worker(target, replace(fetching(first), request_id="fetch"))
    assert tokens == alone[0].token_ids
    assert usage.num_fetched_tokens == usage.num_host_tokens == usage.num_cached_tokens == 384
    [told] = [one for one in target.engine.timelines.events_of("fetch") if one["what"] == "prefix_fetched"]
    assert (told["outcome"], told["tokens"]) == ("fetched", 384)
    registry = target.engine.metrics.registry
    labels = {"model": "tiny", "worker": "w1"}
    full = registry.get_sample_value("transom_kv_transfer_full_length_bytes_total", labels)
    assert told["bytes"] < 0.7 * (full or 0)  # the windows' live blocks alone
    await equal.until_quiet()


@pytest.mark.parametrize("at", ["open", "read"])
@pytest.mark.parametrize("how", ["dies", "hangs"])
async def test_a_source_that_is_lost_costs_a_recompute(equal: Cluster, alone: list[Whole], at: str, how: str) -> None:
    source, target = equal.replicas
    evict(target)
    first = requests_of()[0]
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


async def test_a_client_that_leaves_in_mid_transfer_takes_it_along(equal: Cluster) -> None:
    source, target = equal.replicas
    evict(target)
    first = requests_of()[0]
    await at_worker(source, replace(first, request_id="warm-left"))
    reached = asyncio.Event()

    def before(name: str) -> Any:
        if name != "read":
            return None
        reached.set()
        return asyncio.Event().wait()

    equal.peers.before = before
    try:
        waits = asyncio.create_task(at_worker(target, replace(fetching(first), request_id="left")))
        await reached.wait()
        waits.cancel()
        await asyncio.wait([waits])
        await equal.until_quiet()
    finally:
        equal.peers.before = lambda _: None

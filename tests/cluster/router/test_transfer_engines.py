"""Prefixes move between two workers with real engines, and the tokens are those of the worker that computed them.

tests/end_to_end/test_everything_at_once.py has all policies with handover and failover on top, through a router.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import until
from transom_core.contract import PrefixSource, Request, SamplingParams, WindowPolicy
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer, PrefixQuery
from transom_core.contract.prefix_peers import Bytes
from transom_core.settings.settings import Settings
from transom_worker.replica import WorkerReplica

PROMPT = tuple(range(5, 405))
NUM_TOKENS = 12
HYBRID = {"window": 40, "window_pattern": "SF", "sinks": 4}
WINDOW = WindowPolicy(sinks=4, window=40)
MOST_BLOCKS = 1 + 3 + 1  # of 16 tokens: of the sinks, and of 39 tokens that begin within a block


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


class Pair:
    """Two workers, `source` and `target`, of which the second has a short limit for fetches."""

    def __init__(self, model: Path, layers: dict[str, Any]) -> None:
        self.peers = LocalPeers()
        for name, more in (("w0", {}), ("w1", {"kv_transfer_timeout_s": 0.2})):
            values = {
                "model": str(model),
                "kv_cache_memory_bytes": "8MiB",
                "swap_space": "8MiB",
                "max_num_seqs": 8,
                "dtype": "float32",
                **layers,
                **more,
            }
            config = Settings.parse(**values).engine_config()
            self.peers.workers[name] = WorkerReplica(config, "tiny", name, peers=self.peers)
        self.source, self.target = self.replicas = list(self.peers.workers.values())

    def evict_all(self) -> None:
        for replica in self.replicas:
            replica._thread.call(replica.engine.scheduler.cache.evict_all).result()

    def fetch_of(self, request_id: str) -> dict[str, Any]:
        """How a request's fetch ended at the target."""
        events = self.target.engine.timelines.events_of(request_id)
        [told] = [one for one in events if one["what"] == "prefix_fetched"]
        return told

    async def until_quiet(self) -> None:
        """Wait until no worker has anything of a request or a transfer."""
        for replica in self.replicas:
            await until(lambda replica=replica: not replica.engine.requests and not replica.num_requests)  # type: ignore[misc]
            await until(lambda r=replica: not len(r.exports or ()) and not len(r.fetches or ()))  # type: ignore[misc]
            await replica._on_engine(lambda: None)
            cache = replica.engine.scheduler.cache
            assert not any(group.active_blocks for group in replica.engine.scheduler.stats().groups)
            assert not cache.tiers.exports.reads_device
            assert not cache.tiers.imports.opened


@pytest.fixture(scope="module", params=["hybrid"])
def pair(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Pair]:
    """Two workers of a model with sliding windows, or without any."""
    made = Pair(tiny_model, HYBRID if request.param == "hybrid" else {})
    yield made
    for replica in made.replicas:
        replica.shutdown()


WITHOUT_WINDOWS = pytest.mark.parametrize("pair", ["full"], indirect=True)


def request(
    name: str, *, length: int = len(PROMPT), fetches: bool = False, policy: WindowPolicy | None = None
) -> Request:
    source = PrefixSource(worker="w0", num_tokens=384) if fetches else None
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
    return Request(
        request_id=name, prompt_token_ids=PROMPT[:length], params=params, seed=1, prefix_source=source, kv_policy=policy
    )


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


async def test_a_fetched_prefix_is_a_hit_of_live_blocks(pair: Pair) -> None:
    pair.evict_all()
    expected, _ = await at_worker(pair.source, request("warm"))
    tokens, usage = await at_worker(pair.target, request("fetch", fetches=True))
    assert tokens == expected
    assert usage.num_fetched_tokens == usage.num_host_tokens == usage.num_cached_tokens == 384
    told = pair.fetch_of("fetch")
    assert (told["outcome"], told["tokens"]) == ("fetched", 384)
    registry = pair.target.engine.metrics.registry
    labels = {"model": "tiny", "worker": "w1"}
    full = registry.get_sample_value("transom_kv_transfer_full_length_bytes_total", labels)
    assert told["bytes"] < 0.7 * (full or 0)  # the windows' live blocks alone
    await pair.until_quiet()


@WITHOUT_WINDOWS
@pytest.mark.parametrize("length", [100, 400])
async def test_a_policys_window_moves_alone_whatever_the_prompts_length(pair: Pair, length: int) -> None:
    pair.evict_all()
    expected, _ = await at_worker(pair.source, request(f"warm-{length}", length=length, policy=WINDOW))
    wanted = request(f"fetch-{length}", length=length, fetches=True, policy=WINDOW)
    tokens, usage = await at_worker(pair.target, wanted)
    assert tokens == expected
    hit = (length - 1) // 16 * 16
    assert usage.num_fetched_tokens == usage.num_cached_tokens == hit
    told = pair.fetch_of(wanted.request_id)
    assert (told["outcome"], told["tokens"]) == ("fetched", hit)
    [group] = pair.source.engine.scheduler.cache.layout.groups
    assert 0 < told["bytes"] <= MOST_BLOCKS * group.block_bytes
    await pair.until_quiet()


@WITHOUT_WINDOWS
async def test_a_policys_prefix_serves_no_other_policy(pair: Pair) -> None:
    pair.evict_all()
    await at_worker(pair.source, request("warm-other", policy=WINDOW))
    for name, policy in (("none", None), ("other", WindowPolicy(sinks=4, window=41))):
        _, usage = await at_worker(pair.target, request(name, fetches=True, policy=policy))
        assert usage.num_fetched_tokens == 0
        assert pair.fetch_of(name)["outcome"] == "not_found"
    await pair.until_quiet()


@pytest.mark.parametrize("at", ["open", "read"])
@pytest.mark.parametrize("how", ["dies", "hangs"])
async def test_a_source_that_is_lost_costs_a_recompute(pair: Pair, at: str, how: str) -> None:
    pair.evict_all()
    expected, _ = await at_worker(pair.source, request(f"warm-{at}-{how}"))

    def before(name: str) -> Any:
        if name != at:
            return None
        if how == "dies":
            raise ConnectionError("the worker is gone")
        return asyncio.Event().wait()

    pair.peers.before = before
    try:
        tokens, usage = await at_worker(pair.target, request(f"fetch-{at}-{how}", fetches=True))
    finally:
        pair.peers.before = lambda _: None
    assert tokens == expected
    assert usage.num_cached_tokens == usage.num_fetched_tokens == 0
    await pair.until_quiet()

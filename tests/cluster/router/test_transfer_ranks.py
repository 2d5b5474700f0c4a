"""Prefixes move between whole workers of different numbers of ranks, which have one identity, and not between number formats.

Every pair of numbers of ranks is in tests/worker/kvcache/tiers/block_format/test_convert.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.router.test_transfer_engines import HYBRID, PROMPT, LocalPeers, at_worker
from tests.thread_ranks import ThreadRanks
from tests.tiny_checkpoints import tiny_llama
from transom_core.contract import PrefixSource, Request, SamplingParams, WindowPolicy
from transom_core.settings.settings import Settings
from transom_worker.engine.startup import build_engine
from transom_worker.replica import WorkerReplica

LAYERS: dict[str, dict[str, Any]] = {"hybrid": HYBRID, "full": {}, "window policy": {}}
POLICIES: dict[str, WindowPolicy] = {"window policy": WindowPolicy(sinks=4, window=40)}
NUM_TOKENS = 12
HIT = 384


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six attention heads over two KV heads: three ranks keep one KV head twice, uneven for both."""
    return tiny_llama(tmp_path_factory.mktemp("two_kv_heads"))


@pytest.fixture(scope="module")
def three_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV heads: two ranks have two and one."""
    return tiny_llama(tmp_path_factory.mktemp("three_kv_heads"), kv_heads=3)


@contextmanager
def worker(peers: LocalPeers, model: Path, size: int, **settings: Any) -> Iterator[WorkerReplica]:
    """A worker over `size` ranks, which are threads."""
    values = {
        "model": str(model),
        "device": "cpu",
        "kv_cache_memory_bytes": "4MiB",
        "swap_space": "4MiB",
        "max_num_seqs": 8,
        "dtype": "float32",
        **settings,
    }
    config = Settings.parse(**values).engine_config()
    name = f"w{len(peers.workers)}"
    engine = build_engine(config, model_name="tiny", worker=name, executor=ThreadRanks(config, size))
    replica = WorkerReplica(config, "tiny", name, engine=engine, peers=peers)
    peers.workers[name] = replica
    try:
        yield replica
    finally:
        replica.shutdown()


def request(name: str, source: str | None = None, *, layers: str) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=PROMPT,
        params=SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, logprobs=2),
        seed=1,
        prefix_source=None if source is None else PrefixSource(worker=source, num_tokens=HIT),
        kv_policy=POLICIES.get(layers),
    )


async def fetched(
    source: WorkerReplica, target: WorkerReplica, name: str, *, layers: str
) -> tuple[list[int], list[int]]:
    """The source's answer, and the target's, which fetches the prompt's prefix."""
    expected, _ = await at_worker(source, request(f"warm-{name}", layers=layers))
    tokens, usage = await at_worker(target, request(f"fetch-{name}", source._worker, layers=layers))
    assert usage.num_fetched_tokens == usage.num_host_tokens == usage.num_cached_tokens == HIT
    [told] = [one for one in target.engine.timelines.events_of(f"fetch-{name}") if one["what"] == "prefix_fetched"]
    assert (told["outcome"], told["tokens"]) == ("fetched", HIT)
    return expected, tokens


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(("of_source", "of_target"), [(1, 2), (2, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("heads", ["model", "three_heads"])
async def test_ranks(request: pytest.FixtureRequest, heads: str, layers: str, of_source: int, of_target: int) -> None:
    model: Path = request.getfixturevalue(heads)
    peers = LocalPeers()
    with (
        worker(peers, model, of_source, **LAYERS[layers]) as source,
        worker(peers, model, of_target, **LAYERS[layers]) as target,
    ):
        expected, tokens = await fetched(source, target, "ranks", layers=layers)
    assert tokens == expected


@pytest.mark.parametrize("other", [{"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}, {"window": 41}], ids=str)
async def test_numbers_of_other_formats_are_of_another_identity(tiny_model: Path, other: dict[str, Any]) -> None:
    """Converted, they would be cached as if this worker had computed them."""
    peers = LocalPeers()
    with (
        worker(peers, tiny_model, 1, **HYBRID) as target,
        worker(peers, tiny_model, 1, **{**HYBRID, **other}) as source,
    ):
        await at_worker(source, request("warm", layers="hybrid"))
        _, usage = await at_worker(target, request("fetch", source._worker, layers="hybrid"))
        assert usage.num_fetched_tokens == 0
        [told] = [one for one in target.engine.timelines.events_of("fetch") if one["what"] == "prefix_fetched"]
        assert told["outcome"] == "refused"

"""Prefixes move between two workers with real engines, and the tokens are those of the worker that computed them. They move between
workers of different numbers of ranks, which have one identity, and not between number formats.

tests/end_to_end/test_everything_at_once.py has all policies with handover and failover on top, through a router; every pair of
numbers of ranks is in tests/worker/kvcache/tiers/test_block_format.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.cluster.conftest import until
from tests.cluster.router.engine_workers import (
    HIT,
    HYBRID,
    PROMPT,
    WIRES,
    LocalPeers,
    Mortal,
    answers_of,
    at_worker,
    evict_all,
    fetch_of,
    request,
    routed,
)
from tests.tiny_checkpoints import tiny_llama
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from tests.worker.models.test_sharded_families import CASES as SHARDED
from transom_core.contract import WindowPolicy

WINDOW = WindowPolicy(sinks=4, window=40)
LIVE_WINDOW_BLOCKS = 1 + 3  # of HYBRID: the sinks', and those of the 39 tokens before the end of a block
MOST_BLOCKS = 1 + 3 + 1  # of 16 tokens: of the sinks, and of 39 tokens that begin within a block
LAYERS: dict[str, dict[str, Any]] = {"hybrid": HYBRID, "full": {}, "window policy": {}}
# By how they keep a prefix: states and convolution rows of heads or channels (of heads that share keys on several ranks: Granite),
# latent rows that every rank has, both, and entries.
FAMILIES = (
    "qwen3_5", "granite4", "kimi_linear", "deepseek_v3", "lfm2", "jamba", "nemotron_h", "falcon_h1", "glm_moe_dsa", "deepseek_v4",
)  # fmt: skip
CASES = list(product([2, 3], [(1, 2), (2, 1), (3, 2), (2, 3)], LAYERS))


class Pair:
    """Two workers, `source` and `target`."""

    def __init__(self, model: Path, wire: str, layers: dict[str, Any]) -> None:
        self.peers = LocalPeers()
        self.source = self.peers.start(model, **layers, kv_transfer_wire=wire)
        self.target = self.peers.start(model, **layers, kv_transfer_wire=wire)
        self.replicas = [self.source, self.target]

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


@pytest.fixture(scope="module", params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    """How the blocks move."""
    return request.param


@pytest.fixture(scope="module", params=["hybrid"])
def pair(request: pytest.FixtureRequest, tiny_model: Path, wire: str) -> Iterator[Pair]:
    """Two workers of a model with sliding windows, or without any."""
    made = Pair(tiny_model, wire, HYBRID if request.param == "hybrid" else {})
    yield made
    for replica in made.replicas:
        replica.shutdown()


async def test_a_fetched_prefix_is_a_hit_of_live_blocks(pair: Pair, wire: str) -> None:
    evict_all(*pair.replicas)
    expected, _ = await at_worker(pair.source, request("warm"))
    tokens, usage = await at_worker(pair.target, request("fetch", "w0"))
    assert tokens == expected
    assert usage.num_fetched_tokens == usage.num_host_tokens == usage.num_cached_tokens == HIT
    told = fetch_of(pair.target, "fetch")
    assert (told["outcome"], told["tokens"], told["wire"]) == ("fetched", HIT, wire)
    registry = pair.target.engine.metrics.registry
    full = registry.get_sample_value("transom_kv_transfer_full_length_bytes_total", {"model": "tiny", "worker": "w1"})
    assert told["bytes"] < 0.7 * (full or 0)  # the windows' live blocks alone
    await pair.until_quiet()


async def test_the_decoder_reads_a_prompt_while_it_is_computed(pair: Pair, tiny_model: Path, wire: str) -> None:
    """The steps of the prefill worker have 16 tokens each; it offers new blocks between them, and windows with the last ones."""
    evict_all(*pair.replicas)
    prefill = pair.peers.start(tiny_model, **HYBRID, kv_transfer_wire=wire, max_num_batched_tokens=16)
    pair.replicas.append(prefill)
    expected, _ = await at_worker(prefill, request("one", prompt=PROMPT[::-1]))
    evict_all(prefill)
    wanted = replace(request("two", prompt=PROMPT[::-1]), prefill_only=True, decoder="w1")
    await at_worker(prefill, wanted)
    await until(lambda: prefill._handovers is not None and not prefill._handovers._tasks)
    tiers = pair.target.engine.scheduler.cache.index.tiers
    early = [sum(map(len, of_group)) for of_group in zip(*tiers, strict=True)]
    assert early == [len(PROMPT) // 16, LIVE_WINDOW_BLOCKS]
    continues = replace(request("three", "w2", prompt=PROMPT[::-1]), resumed_output_ids=tuple(expected[:1]))
    tokens, usage = await at_worker(pair.target, continues)
    assert (tokens, usage.num_cached_tokens) == (expected[1:], len(PROMPT))
    assert fetch_of(pair.target, "three")["outcome"] == "present"
    await pair.until_quiet()


async def test_a_prefix_comes_into_full_tiers(pair: Pair, tiny_model: Path, tmp_path: Path, wire: str) -> None:
    """Dropped blocks go to the disk, and their memory is the prefix's."""
    small: dict[str, Any] = {
        "kv_cache_memory_bytes": "320KiB",
        "swap_space": "320KiB",
        "max_num_seqs": 1,
        "max_model_len": 512,
    }
    disk: dict[str, Any] = {"disk_cache": str(tmp_path), "disk_space": "8MiB"}
    full = pair.peers.start(tiny_model, **HYBRID, **small, **disk, kv_transfer_wire=wire)
    pair.replicas.append(full)
    for number in range(2):
        for other in range(3):
            await at_worker(
                full, request(f"other {number}-{other}", prompt=tuple(range(500 + 3 * number + other, 900)))
            )
        prompt = tuple(range(10 + number, 410 + number))
        expected, _ = await at_worker(pair.source, request(f"warm {number}", prompt=prompt))
        tokens, usage = await at_worker(full, request(f"fetch {number}", "w0", prompt=prompt))
        assert (tokens, usage.num_fetched_tokens) == (expected, HIT)
    await pair.until_quiet()


async def test_a_measurement_brings_cached_blocks_and_leaves_nothing(pair: Pair, wire: str) -> None:
    evict_all(*pair.replicas)
    assert (await pair.target.measure_fetch("w0", 1000, wire))["outcome"] == "not_found"
    await at_worker(pair.source, request("warm to measure"))
    sizes = [group.block_bytes for group in pair.source.engine.scheduler.cache.layout.groups]
    told = await pair.target.measure_fetch("w0", 5 * sizes[0] - 1, wire)
    assert (told["outcome"], told["wire"], told["num_bytes"]) == ("fetched", wire, 5 * sizes[0])
    assert 0 < told["read_s"] <= told["seconds"]
    await pair.until_quiet()
    assert not any(len(found) for tier in pair.target.engine.scheduler.cache.index.tiers for found in tier)


@pytest.mark.parametrize("pair", ["full"], indirect=True)
@pytest.mark.parametrize("length", [100, 400])
async def test_a_policys_window_moves_alone_whatever_the_prompts_length(pair: Pair, length: int) -> None:
    evict_all(*pair.replicas)
    expected, _ = await at_worker(pair.source, request(f"warm-{length}", prompt=PROMPT[:length], policy=WINDOW))
    wanted = request(f"fetch-{length}", "w0", prompt=PROMPT[:length], policy=WINDOW)
    tokens, usage = await at_worker(pair.target, wanted)
    assert tokens == expected
    hit = (length - 1) // 16 * 16
    told = fetch_of(pair.target, wanted.request_id)
    assert (told["outcome"], told["tokens"]) == ("fetched", hit)
    assert usage.num_fetched_tokens == usage.num_cached_tokens == hit
    [group] = pair.source.engine.scheduler.cache.layout.groups
    assert 0 < told["bytes"] <= MOST_BLOCKS * group.block_bytes
    await pair.until_quiet()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of KV heads. With two, three ranks keep one of them twice, uneven for both; of three, two ranks have two and
    one."""
    return {heads: tiny_llama(tmp_path_factory.mktemp(f"{heads}_kv_heads"), kv_heads=heads) for heads in (2, 3)}


@pytest.fixture
def peers() -> Iterator[LocalPeers]:
    made = LocalPeers()
    yield made
    for replica in made.workers.values():
        replica.shutdown()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("heads", "sizes", "layers"),
    [  # every day one kind of layers for each pair of sizes, in turn
        *(
            case if number % 3 == number // 3 % 3 else pytest.param(*case, marks=pytest.mark.exhaustive)
            for number, case in enumerate(CASES)
        )
    ],
)
@pytest.mark.usefixtures("torch_operators")
async def test_ranks(
    models: dict[int, Path], peers: LocalPeers, heads: int, sizes: tuple[int, int], layers: str, wire: str
) -> None:
    policy = WINDOW if layers == "window policy" else None
    await check_fetch(peers, models[heads], sizes, wire, policy, **LAYERS[layers])


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("family", "sizes"),
    [  # every day two recurrent families, one latent and one with both
        pytest.param(family, sizes, marks=() if at < 4 and sizes[0] == 2 + at % 2 else pytest.mark.exhaustive)
        for (at, family), sizes in product(enumerate(FAMILIES), [(2, 3), (3, 2)])
    ],
)
@pytest.mark.usefixtures("torch_operators")
async def test_ranks_of_families(
    tmp_path: Path, peers: LocalPeers, family: str, sizes: tuple[int, int], wire: str
) -> None:
    if family == "deepseek_v4":  # which has two groups of output heads, so at most two ranks
        model, sizes = make_deepseek_v4(tmp_path), (sizes[0] - 1, sizes[1] - 1)
    else:
        model = make_checkpoint(tmp_path, SHARDED[family].family, **SHARDED[family].config)
    await check_fetch(peers, model, sizes, wire)


async def check_fetch(
    peers: LocalPeers,
    model: Path,
    sizes: tuple[int, int],
    wire: str,
    policy: WindowPolicy | None = None,
    **settings: Any,
) -> None:
    """A worker with as many ranks as `sizes` says fetches what another one has computed, and answers as that one does. So it does
    if a stream migrates, from a worker that leaves or one that is lost."""
    settings |= {"kv_transfer_wire": wire, "kv_transfer_verify": "all"}
    source, target = (peers.start(model, num_ranks=size, **settings) for size in sizes)
    expected, _ = await at_worker(source, request("warm", policy=policy, logprobs=2))
    tokens, usage = await at_worker(target, request("fetch", "w0", policy=policy, logprobs=2))
    assert usage.num_fetched_tokens == usage.num_host_tokens == usage.num_cached_tokens == HIT
    told = fetch_of(target, "fetch")
    assert (told["outcome"], told["tokens"], told["wire"]) == ("fetched", HIT, wire)
    assert tokens == expected
    evict_all(target)
    left = replace(request("left", "w0", policy=policy, logprobs=2), resumed_output_ids=tuple(expected[:5]))
    tokens, usage = await at_worker(target, left)
    assert tokens == expected[5:]
    assert usage.num_fetched_tokens >= HIT  # and the prompt's last block, unless the only state lies before it
    evict_all(target)
    workers = [Mortal(source), Mortal(target)]
    for worker in workers:
        worker.num_events = 7  # of 12, so that one of them is lost
    async with routed(model, *workers) as router:
        assert await answers_of(router, [request("lost", policy=policy, logprobs=2)]) == [expected]
    assert [worker.is_dead for worker in workers].count(True) == 1


@pytest.mark.parametrize("other", [{"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}, {"window": 41}], ids=str)
@pytest.mark.usefixtures("torch_operators")
async def test_numbers_of_other_formats_are_of_another_identity(
    tiny_model: Path, peers: LocalPeers, other: dict[str, Any]
) -> None:
    """Converted, they would be cached as if this worker had computed them."""
    source, target = (peers.start(tiny_model, num_ranks=1, **{**HYBRID, **more}) for more in (other, {}))
    await at_worker(source, request("warm"))
    _, usage = await at_worker(target, request("fetch", "w0"))
    assert usage.num_fetched_tokens == 0
    assert fetch_of(target, "fetch")["outcome"] == "refused"

"""Prefixes move between whole workers of different numbers of ranks, which have one identity, and not between number formats.

Every pair of numbers of ranks is in tests/worker/kvcache/tiers/test_block_format.py.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.cluster.router.engine_workers import HIT, HYBRID, WIRES, LocalPeers, at_worker, fetch_of, request
from tests.tiny_checkpoints import VOCAB_SIZE, tiny_llama
from tests.worker.models.test_dense_families import DELTA_NET
from transom_core.contract import WindowPolicy

pytestmark = pytest.mark.usefixtures("torch_operators")
LAYERS: dict[str, dict[str, Any]] = {"hybrid": HYBRID, "full": {}, "window policy": {}}
POLICIES: dict[str, WindowPolicy] = {"window policy": WindowPolicy(sinks=4, window=40)}
LFM2, QWEN = 5, 7
CASES = list(product([2, 3], [(1, 2), (2, 1), (3, 2), (2, 3)], LAYERS))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of KV heads. With two, three ranks keep one of them twice, uneven for both; of three, two ranks have two and
    one. LFM2's convolutions have five units of channels, of which two ranks have three and two, and Qwen3.5's delta nets three key
    heads."""
    made = {heads: tiny_llama(tmp_path_factory.mktemp(f"{heads}_kv_heads"), kv_heads=heads) for heads in (2, 3)}
    lfm2: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 80, "layer_types": ["conv", "full_attention"] * 2}
    qwen = DELTA_NET | {"vocab_size": VOCAB_SIZE, "num_key_value_heads": 4}
    return made | {
        LFM2: make_checkpoint(tmp_path_factory.mktemp("lfm2"), "lfm2", **lfm2),
        QWEN: make_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_5_text", **qwen),
    }


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
        ),
        (LFM2, (2, 3), "full"),
        (QWEN, (3, 2), "full"),
        pytest.param(QWEN, (2, 3), "full", marks=pytest.mark.exhaustive),
        pytest.param(LFM2, (3, 2), "full", marks=pytest.mark.exhaustive),
    ],
)
async def test_ranks(
    models: dict[int, Path], peers: LocalPeers, heads: int, sizes: tuple[int, int], layers: str, wire: str
) -> None:
    settings = {"kv_transfer_wire": wire, "kv_transfer_verify": "all", **LAYERS[layers]}
    source, target = (peers.start(models[heads], num_ranks=size, **settings) for size in sizes)
    policy = POLICIES.get(layers)
    expected, _ = await at_worker(source, request("warm", policy=policy, logprobs=2))
    tokens, usage = await at_worker(target, request("fetch", "w0", policy=policy, logprobs=2))
    assert usage.num_fetched_tokens == usage.num_host_tokens == usage.num_cached_tokens == HIT
    told = fetch_of(target, "fetch")
    assert (told["outcome"], told["tokens"], told["wire"]) == ("fetched", HIT, wire)
    assert tokens == expected


@pytest.mark.parametrize("other", [{"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}, {"window": 41}], ids=str)
async def test_numbers_of_other_formats_are_of_another_identity(
    tiny_model: Path, peers: LocalPeers, other: dict[str, Any]
) -> None:
    """Converted, they would be cached as if this worker had computed them."""
    source, target = (peers.start(tiny_model, num_ranks=1, **{**HYBRID, **more}) for more in (other, {}))
    await at_worker(source, request("warm"))
    _, usage = await at_worker(target, request("fetch", "w0"))
    assert usage.num_fetched_tokens == 0
    assert fetch_of(target, "fetch")["outcome"] == "refused"

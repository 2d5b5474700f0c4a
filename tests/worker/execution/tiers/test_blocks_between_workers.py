"""Blocks that a worker has computed are, cut and joined, those that a worker with another number of ranks computes."""

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.engine_driver import make_request, run
from tests.thread_ranks import make_sharded_engine
from tests.tiny_checkpoints import tiny_llama
from tests.worker.models.test_moe_families import CASES as MIXTURES
from transom_core.kv_cache.hashing import chain_root, extend_chain
from transom_core.kv_cache.kv_shares import KvShares
from transom_worker.kvcache.tiers.block_format import convert_blocks
from transom_worker.scheduling.step import TIER_DEVICE

pytestmark = pytest.mark.usefixtures("torch_operators")
PROMPT = list(range(5, 45))  # two whole blocks
SETTINGS = {"device": "cpu", "dtype": "float32", "window": 24, "window_pattern": "SF"}


def computed(model: Path, size: int) -> tuple[KvShares, list[list[bytes]]]:
    """What the blocks of a worker with `size` ranks contain, and the blocks of the prompt, by group and rank."""
    engine, ranks = make_sharded_engine(str(model), size, **SETTINGS)
    run(engine, [make_request("one", PROMPT, max_tokens=1)])
    chain: list[bytes] = []
    extend_chain(chain, chain_root(16, identity=engine.info.identity), PROMPT, 16)
    maps, shares = engine.scheduler.cache.index.groups, engine.info.shares
    found = [
        ranks.read_blocks(TIER_DEVICE, group, [maps[group][digest] for digest in chain]) for group in range(len(maps))
    ]
    engine.shutdown()
    assert shares is not None
    return shares, found


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_blocks_of_one_two_and_three_ranks(tmp_path: Path, family: str) -> None:
    """llama has 2 KV heads: with 3 ranks one is kept twice. All ranks have DeepSeek's latent rows."""
    is_llama = family == "llama"
    model = tiny_llama(tmp_path) if is_llama else make_checkpoint(tmp_path, family, **MIXTURES[family].config)
    workers = [computed(model, size) for size in (1, 2, 3)]
    for source, before in workers:
        for target, after in workers:
            for group in range(2):
                converted = convert_blocks(source, target, group, before[group])
                for got, wanted in zip(converted, after[group], strict=True):
                    numbers = np.frombuffer(wanted, dtype=np.float32)
                    assert np.abs(numbers).max() > 0.1
                    np.testing.assert_allclose(got.view(np.float32), numbers, atol=1e-4)

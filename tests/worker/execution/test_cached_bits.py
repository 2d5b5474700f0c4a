"""What a quantised cache holds of a token depends on its prefix alone, and not on chunks or on prompts beside it.

Chunks of sixteen tokens or fewer are attended to in another order of sums, in quantised caches as in others; their keys differ in
float32's last bits.
"""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import prompt
from tests.engine_driver import make_request, run
from tests.thread_ranks import make_sharded_engine
from transom_kernels.launch import has_cpu_kernels

Blocks = dict[tuple[int, bytes], torch.Tensor]  # by group and digest

pytestmark = pytest.mark.skipif(not has_cpu_kernels(), reason="torch's products depend on the number of rows")


def cached(model: Path, lengths: list[int], *, chunk: int) -> Blocks:
    """Every published block's bytes after these prompts."""
    engine, ranks = make_sharded_engine(
        str(model), 1, block_size=8, max_model_len=256, max_num_batched_tokens=chunk, kv_cache_dtype="int8"
    )
    run(engine, [make_request(f"{length}", prompt(length), max_tokens=1) for length in lengths])
    runner, found = ranks.runners[0], {}
    for index, pool in enumerate(engine.scheduler.cache.pools):
        group = runner.info.layout.groups[index]
        for block, (digest, _) in pool.published.items():
            begin = block * group.stride_bytes
            found[index, digest] = runner.tiers.device.slab[begin : begin + group.block_bytes].clone()
    engine.shutdown()
    return found


def test_chunks_and_neighbours_leave_the_same_bytes(tiny_model: Path) -> None:
    whole = cached(tiny_model, [200], chunk=1024)
    assert len(whole) == 200 // 8
    for lengths, chunk in (([200], 45), ([200, 120, 90], 1024)):
        pieces = cached(tiny_model, lengths, chunk=chunk)
        assert whole.keys() <= pieces.keys()
        assert all(torch.equal(pieces[key], block) for key, block in whole.items())

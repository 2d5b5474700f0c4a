"""LFM2 in chunks of every size, and from a prefix hit at every block: a hit needs no minimum length.

The family tests compare it with transformers, and `tests/end_to_end/test_combinations.py` turns all else on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint, prompt
from tests.engine_driver import make_engine, make_request, run
from tests.lost_windows import lose_windows
from tests.worker.models.test_dense_families import CASES

BLOCK, LENGTH, NUM_TOKENS = 8, 200, 6
PROMPT = prompt(LENGTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lfm2"), "lfm2", **CASES["lfm2"].config)


def answers(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    """One after the other."""
    engine = make_engine(str(folder), dtype="float32", block_size=BLOCK, max_model_len=256, **settings)
    wholes = [run(engine, [make_request(f"{i}", ids, max_tokens=NUM_TOKENS)])[0] for i, ids in enumerate(prompts)]
    engine.shutdown()
    return [whole.token_ids for whole in wholes]


def test_chunks_of_every_size(folder: Path) -> None:
    wanted = answers(folder, [PROMPT], enable_prefix_caching=False)
    for chunk in (1, 2, 3, 5, 7, 8, 9, 31, 199, 200):
        assert answers(folder, [PROMPT], enable_prefix_caching=False, max_num_batched_tokens=chunk) == wanted, chunk


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_hit_at_every_block_and_a_repair_there(folder: Path, is_lost: bool) -> None:
    """After a prompt whose blocks are all kept, or whose rows of convolutions are lost."""
    ends = range(BLOCK, LENGTH, BLOCK)
    prompts = [[*PROMPT[:end], *prompt(9, salt=end)] for end in ends]
    wanted = answers(folder, prompts, enable_prefix_caching=False)
    engine = make_engine(str(folder), dtype="float32", block_size=BLOCK, max_model_len=256)
    for end, ids, tokens in zip(ends, prompts, wanted, strict=True):
        run(engine, [make_request(f"warm{end}", PROMPT, max_tokens=1)])
        if is_lost:
            lose_windows(engine.scheduler.cache)
        before = engine.scheduler.stats().outcome_tokens.get("repaired", 0)
        (whole,) = run(engine, [make_request(f"{end}", ids, max_tokens=NUM_TOKENS)])
        repaired = engine.scheduler.stats().outcome_tokens.get("repaired", 0) - before
        assert whole.token_ids == tokens, end
        # The last block, and for each of two lower convolutions 3 tokens before it, which lie in the block before.
        lost = 2 * BLOCK if is_lost else 0
        assert (whole.num_cached_tokens, repaired) == ((end - lost, lost) if end > lost else (0, 0))
    engine.shutdown()

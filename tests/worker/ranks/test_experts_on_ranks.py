"""Experts, learned sinks by head and windows on several ranks, up to as many as there are query heads, beside one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint, prompt
from tests.engine_driver import Whole, make_engine, make_request, run

CONFIG: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 16, "swiglu_limit": 1.5}
LENGTHS = (1, 17, 40, 90)
SAMPLED: dict[str, Any] = {"temperature": 0.8, "logprobs": 2, "repetition_penalty": 1.1}
LOOKED_AT: dict[str, Any] = {"prompt_logprobs": 1, "logprobs": 0}  # these read no cache


def answers(model: Path, **settings: Any) -> list[Whole]:
    engine = make_engine(
        str(model), block_size=8, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=32, device="cpu", **settings
    )
    found = []
    # The second one finds the first one's prompts in the cache.
    for turn, params in enumerate(({}, SAMPLED, LOOKED_AT)):
        requests = [make_request(f"{turn}-{n}", prompt(n), max_tokens=10, **params) for n in LENGTHS]
        found += run(engine, requests)
    engine.shutdown()
    return found


@pytest.mark.exhaustive  # every day ranks are threads of one process, see `models/test_sharded_families`
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_answer_as_one(tmp_path: Path, ranks: int) -> None:
    make_checkpoint(tmp_path, "gpt_oss", **CONFIG)
    alone = answers(tmp_path)
    together = answers(tmp_path, tensor_parallel_size=ranks, steps_in_flight=2)
    assert [whole.token_ids for whole in together] == [whole.token_ids for whole in alone]
    assert [whole.text for whole in together] == [whole.text for whole in alone]
    assert sum(whole.num_cached_tokens for whole in together) > 0
    for one, other in zip(alone, together, strict=True):
        for left, right in zip(one.logprobs, other.logprobs, strict=True):
            assert abs(left.chosen.logprob - right.chosen.logprob) < 1e-4

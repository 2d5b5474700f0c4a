"""Scores of classifiers are transformers' own: in chunks, from the cache, and on two ranks, each of which has the whole head."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint, make_classifier, prompt
from tests.engine_driver import embeddings, make_engine, make_request
from tests.thread_ranks import make_sharded_engine
from transom_core.errors import RequestError

PROMPTS = [prompt(length) for length in (1, 7, 100)]
SMALL: dict[str, Any] = {"max_num_batched_tokens": 45, "dtype": "float32"}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scores_equal_transformers_on_one_rank_and_two(tmp_path: Path, family: str) -> None:
    oracle = make_classifier(tmp_path / "classifier", make_checkpoint(tmp_path / "text", family))
    with torch.inference_mode():
        expected = [oracle(torch.tensor([ids]), use_cache=False).logits[0].tolist() for ids in PROMPTS]
    engine, (sharded, _) = make_engine(folder := str(tmp_path / "classifier"), **SMALL), make_sharded_engine(folder, 2)
    for one in (engine, engine, sharded):
        events = embeddings(one, PROMPTS, "score")
        assert [event.embedding for event in events] == [pytest.approx(logits, abs=1e-4) for logits in expected]
    events = embeddings(engine, PROMPTS, "score")
    assert [event.usage.num_cached_tokens for event in events if event.usage] == [0, 0, 96]
    with pytest.raises(RequestError, match="writes no text") as refused:
        engine.add(make_request("text", PROMPTS[1]))
    assert refused.value.param == "model"


def test_a_score_needs_a_head_with_one_label(tiny_model: Path, tmp_path: Path) -> None:
    make_classifier(tmp_path, tiny_model, num_labels=3)
    for model, found in ((tiny_model, "no classification head"), (tmp_path, "a head of 3 labels")):
        engine = make_engine(str(model), **SMALL)
        with pytest.raises(RequestError, match=f"{found}.*Qwen3-Reranker as published") as refused:
            engine.add(make_request("score", PROMPTS[1], max_tokens=1, pooling="score"))
        assert refused.value.param == "model"
        engine.shutdown()

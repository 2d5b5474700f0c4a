"""Scores of classifiers are transformers' own: in chunks, from the cache, and on two ranks, each of which has the whole head.
Embeddings on two ranks, and after a preemption in the middle of a prompt; families compare them with transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint, make_classifier, prompt
from tests.engine_driver import drain, embeddings, make_engine, make_request
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


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_of_two_ranks_and_after_a_preemption_are_those_of_one_engine(tiny_model: Path, pooling: str) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "window": 24, "window_pattern": "SF"}
    whole = make_engine(str(tiny_model), **settings, max_num_batched_tokens=1024)
    expected = [pytest.approx(event.embedding, abs=1e-4) for event in embeddings(whole, PROMPTS, pooling)]
    swap = {"swap_space": "4MiB", "preemption_mode": "swap"}
    engine, _ = make_sharded_engine(str(tiny_model), 2, **settings, **swap, max_num_batched_tokens=16)
    assert [event.embedding for event in embeddings(engine, PROMPTS, pooling)] == expected
    engine.add(make_request("preempted", PROMPTS[-1][::-1], max_tokens=1, pooling=pooling))
    for _ in range(2):
        engine.step()
    engine.scheduler.admission.preempt_all()
    for _ in range(2):
        engine.step()
    sequence = engine.scheduler.by_request["preempted"]
    engine.scheduler.admission.preempt(sequence)
    assert sequence.swapped is not None
    engine.scheduler.admission.preempt_all()  # the swapped blocks are lost
    (event,) = drain(engine)
    (alone,) = embeddings(whole, [PROMPTS[-1][::-1]], pooling)
    assert event.embedding == pytest.approx(alone.embedding, abs=1e-4)
    work = engine.scheduler.work
    assert (work.num_preemptions, work.num_swaps) == (1, 1)
    assert len(event.embedding or ()) == engine.info.hidden_size

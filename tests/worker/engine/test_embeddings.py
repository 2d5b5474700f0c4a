"""Embeddings on two ranks, and after a preemption in the middle of a prompt. Families compare them with transformers' own."""

from typing import Any

import pytest

from tests.checkpoints import prompt
from tests.engine_driver import drain, embeddings, make_engine, make_request
from tests.thread_ranks import make_sharded_engine

PROMPTS = [prompt(length) for length in (1, 7, 100)]
SMALL: dict[str, Any] = {"max_num_batched_tokens": 16, "dtype": "float32", "window": 24, "window_pattern": "SF"}


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_two_ranks_and_a_preemption_change_nothing(tiny_model, pooling: str) -> None:
    whole = make_engine(str(tiny_model), **(SMALL | {"max_num_batched_tokens": 1024}))
    expected = [pytest.approx(event.embedding, abs=1e-4) for event in embeddings(whole, PROMPTS, pooling)]
    engine, _ = make_sharded_engine(str(tiny_model), 2, **SMALL)
    assert [event.embedding for event in embeddings(engine, PROMPTS, pooling)] == expected
    engine.add(make_request("preempted", PROMPTS[-1][::-1], max_tokens=1, pooling=pooling))
    for _ in range(3):
        engine.step()
    engine.scheduler.admission.preempt_all()
    (event,) = drain(engine)
    (alone,) = embeddings(whole, [PROMPTS[-1][::-1]], pooling)
    assert event.embedding == pytest.approx(alone.embedding, abs=1e-4)
    assert engine.scheduler.work.num_preemptions == 1
    assert len(event.embedding or ()) == engine.info.hidden_size

"""The offline benchmark measures whole batches, and leaves the engine idle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_driver import make_engine
from transom_core.errors import RequestError
from transom_worker.bench.offline import run_offline
from transom_worker.engine.engine import Engine


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = make_engine(str(tiny_model), max_num_batched_tokens=16, max_model_len=256)
    yield engine
    engine.shutdown()


def test_every_decode_step_has_the_whole_batch(engine: Engine) -> None:
    """Even where prompts take many steps, so that the first answers are long when the last one begins."""
    figures = run_offline(engine, batches=(1, 6), prompt_tokens=50, output_tokens=4, repeats=2)
    assert figures.prefill_tokens_per_s > 0
    assert [figure.batch for figure in figures.decode] == [1, 6]
    for figure in figures.decode:
        assert figure.tokens_per_s * figure.step_ms / 1e3 == pytest.approx(figure.batch)
        assert 0 < figure.outside_forward_ms < figure.step_ms
    assert not engine.has_work
    assert sum(group.active_blocks for group in engine.scheduler.stats().groups) == 0
    assert json.loads(json.dumps(figures.as_json()))["decode"][1]["batch"] == 6


def test_prompts_longer_than_the_engines_length_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"200 prompt and 100 output tokens .* length is 256"):
        run_offline(engine, batches=(1,), prompt_tokens=200, output_tokens=100, repeats=1)

"""Prompts that go on from every block of another: hits, and repairs of lost windows. A hit needs no minimum length.

Of families whose layers keep more than keys and values of single tokens: convolutions, recurrent states, and compressed entries, in
which a boundary may lie anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.checkpoints import greedy, load_oracle, make_checkpoint, prompt
from tests.engine_driver import make_engine, make_request, run
from tests.lost_windows import lose_windows
from tests.matrices import some_daily
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from tests.worker.models.test_moe_families import ALL_CASES
from transom_worker.engine.engine import Engine

NUM_TOKENS = 6
BASE = prompt(140)
# Tokens before a boundary that a repair may compute again. LFM2: the last block, and for each of two lower convolutions 3 tokens
# before it, which lie in the block before.
LONGEST_REPLAY = {"deepseek_v4": 96, "lfm2": 16}


def make(name: str, folder: Path) -> Path:
    return make_checkpoint(folder, ALL_CASES[name].family, **ALL_CASES[name].config)


RECURRENT = ("lfm2", "qwen3_5", "granite4", "nemotron_h", "falcon_h1", "kimi_linear", "jamba")
MODELS: dict[str, Callable[[Path], Path]] = {
    "deepseek_v4": make_deepseek_v4,
    **{name: partial(make, name) for name in RECURRENT},
}


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint, and what transformers has answered so far."""

    family: str
    folder: Path
    oracle: PreTrainedModel
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def start(self, **settings: Any) -> Engine:
        values: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 64}
        values["kv_cache_memory_bytes"] = "32MiB"
        return make_engine(str(self.folder), **(values | settings))

    def check(self, engine: Engine, prompts: list[list[int]]) -> list[int]:
        """Compare greedy tokens; how many tokens of each prompt came from the cache."""
        wholes = run(engine, [make_request(f"c{i}", ids, max_tokens=NUM_TOKENS) for i, ids in enumerate(prompts)])
        for ids, whole in zip(prompts, wholes, strict=True):
            if tuple(ids) not in self.answers:
                self.answers[tuple(ids)] = greedy(self.oracle, ids, NUM_TOKENS, guess=whole.token_ids).token_ids
            assert whole.token_ids == self.answers[tuple(ids)], len(ids)
        return [whole.num_cached_tokens for whole in wholes]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = MODELS[request.param](tmp_path_factory.mktemp(request.param))
    return Model(request.param, folder, load_oracle(folder))


def continuations(boundaries: range) -> list[list[int]]:
    """Prompts that leave BASE at each boundary, for a few tokens or more than an entry."""
    return [[*BASE[:n], *(3 if BASE[n] != 3 else 4, 7, 11, *prompt(n % 19, salt=n))] for n in boundaries]


def fill(engine: Engine, boundaries: range) -> None:
    """Leave a checkpoint of BASE at each boundary."""
    run(engine, [make_request(f"f{n}", BASE[: n + 1], max_tokens=1) for n in boundaries])


@pytest.mark.parametrize(
    ("model", "block_size", "chunk", "hybrid"),
    some_daily(
        [
            *(("deepseek_v4", *rest) for rest in ((4, 29, True), (16, 1024, True), (32, 5, True), (4, 64, False))),
            *((name, *rest) for name in RECURRENT for rest in ((8, 1024, True), (8, 3, True), (4, 5, False))),
        ],
        daily=[
            ("deepseek_v4", 32, 5, True),
            *((name, 8, (1024, 3)[at % 2], True) for at, name in enumerate(RECURRENT)),
        ],
    ),
    indirect=["model"],
)
def test_hits_at_every_boundary(model: Model, block_size: int, chunk: int, hybrid: bool) -> None:
    boundaries = range(block_size, 132, block_size)
    engine = model.start(block_size=block_size, max_num_batched_tokens=chunk, hybrid_kv_cache=hybrid)
    fill(engine, boundaries)
    assert model.check(engine, continuations(boundaries)) == list(boundaries)


@pytest.mark.parametrize(
    ("model", "block_size", "chunk", "steps_in_flight"),
    some_daily(
        [
            *(("deepseek_v4", *rest) for rest in ((4, 7, 1), (4, 1024, 2), (16, 13, 2))),
            *(("lfm2", *rest) for rest in ((8, 1024, 1), (8, 7, 2))),
        ],
        daily=[("deepseek_v4", 16, 13, 2), ("lfm2", 8, 7, 2)],
    ),
    indirect=["model"],
)
def test_repairs_at_every_boundary(model: Model, block_size: int, chunk: int, steps_in_flight: int) -> None:
    boundaries = range(block_size, 132, block_size)
    engine = model.start(block_size=block_size, max_num_batched_tokens=chunk, steps_in_flight=steps_in_flight)
    fill(engine, boundaries)
    for boundary, ids in zip(boundaries, continuations(boundaries), strict=True):
        lose_windows(engine.scheduler.cache)
        (start_of_replay,) = model.check(engine, [ids])
        assert max(0, boundary - LONGEST_REPLAY[model.family]) <= start_of_replay < boundary
    assert engine.scheduler.stats().outcome_tokens["repaired"] > 0

"""DeepSeek V4 at every edge: chunks, hits and repairs begin and end anywhere in a compressed entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.checkpoints import greedy, load_oracle, prompt
from tests.engine_driver import make_engine, make_request, prompt_logprobs, run
from tests.kernels.paged_case import Sequence, Shape, make_case
from tests.lost_windows import lose_windows
from tests.matrices import some_daily
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from transom_core.settings.settings import Settings
from transom_kernels.latent_attention import select_entries
from transom_worker.engine.engine import Engine
from transom_worker.execution.setup.model_setup import ModelSetup
from transom_worker.models.deepseek_v4 import compressor
from transom_worker.models.deepseek_v4.attention_metadata import AttentionMetadata
from transom_worker.models.layers.forward_batch import ForwardBatch, LayerCache
from transom_worker.models.layers.rotary_embedding import RotaryEmbedding

TOLERANCE = 1e-3
NUM_TOKENS = 6
BASE = prompt(140)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_deepseek_v4(tmp_path_factory.mktemp("deepseek_v4_edges"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    return load_oracle(folder)


def start(folder: Path, **settings: Any) -> Engine:
    values: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "kv_cache_memory_bytes": "32MiB",
        "max_num_seqs": 64,
    }
    return make_engine(str(folder), **(values | settings))


@torch.inference_mode()
def logprobs(oracle: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(oracle(torch.tensor([ids]), use_cache=False).logits[0], dim=-1)


@pytest.mark.parametrize(
    ("chunk", "block_size"), some_daily([(1, 16), (3, 4), (16, 16), (23, 32), (1024, 8)], daily=[(3, 4)])
)
def test_every_position_in_any_chunks(folder: Path, oracle: PreTrainedModel, chunk: int, block_size: int) -> None:
    lengths = (130,) if chunk == 1 else (2, 3, 4, 5, 15, 16, 17, 33, 130)
    prompts = [prompt(length, salt=length) for length in lengths]
    engine = start(folder, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 3), block_size=block_size)
    for ids, steps in zip(prompts, prompt_logprobs(engine, prompts), strict=True):
        wanted = logprobs(oracle, ids)
        for position, step in enumerate(steps):
            for logprob in (step.chosen, *step.top):
                assert abs(logprob.logprob - float(wanted[position, logprob.token_id])) < TOLERANCE


def continuations(boundaries: range) -> list[list[int]]:
    """Prompts that leave BASE at each boundary, for a few tokens or more than an entry."""
    return [[*BASE[:n], *(3 if BASE[n] != 3 else 4, 7, 11, *prompt(n % 19, salt=n))] for n in boundaries]


@pytest.fixture(scope="module")
def answers(oracle: PreTrainedModel) -> dict[tuple[int, ...], list[int]]:
    return {}


def check(
    engine: Engine, prompts: list[list[int]], oracle: PreTrainedModel, known: dict[tuple[int, ...], list[int]]
) -> list[int]:
    """Compares greedy tokens; how many tokens of each prompt came from the cache."""
    requests = [make_request(f"c{i}", ids, max_tokens=NUM_TOKENS) for i, ids in enumerate(prompts)]
    answers = run(engine, requests)
    for ids, answer in zip(prompts, answers, strict=True):
        if tuple(ids) not in known:
            known[tuple(ids)] = greedy(oracle, ids, NUM_TOKENS, guess=answer.token_ids).token_ids
        assert answer.token_ids == known[tuple(ids)], len(ids)
    return [answer.num_cached_tokens for answer in answers]


def fill(engine: Engine, boundaries: range) -> None:
    """Leave a checkpoint of BASE at each boundary."""
    run(engine, [make_request(f"f{n}", BASE[: n + 1], max_tokens=1) for n in boundaries])


@pytest.mark.parametrize(
    ("block_size", "chunk", "hybrid"),
    some_daily([(4, 29, True), (16, 1024, True), (32, 5, True), (4, 64, False)], daily=[(32, 5, True)]),
)
def test_hits_at_every_boundary(
    folder: Path,
    oracle: PreTrainedModel,
    answers: dict[tuple[int, ...], list[int]],
    block_size: int,
    chunk: int,
    hybrid: bool,
) -> None:
    boundaries = range(block_size, 132, block_size)
    engine = start(folder, block_size=block_size, max_num_batched_tokens=chunk, hybrid_kv_cache=hybrid)
    fill(engine, boundaries)
    assert check(engine, continuations(boundaries), oracle, answers) == list(boundaries)


@pytest.mark.parametrize(
    ("block_size", "chunk", "steps_in_flight"),
    some_daily([(4, 7, 1), (4, 1024, 2), (16, 13, 2)], daily=[(16, 13, 2)]),
)
def test_repairs_at_every_boundary(
    folder: Path,
    oracle: PreTrainedModel,
    answers: dict[tuple[int, ...], list[int]],
    block_size: int,
    chunk: int,
    steps_in_flight: int,
) -> None:
    boundaries = range(96, 132, block_size)
    engine = start(folder, block_size=block_size, max_num_batched_tokens=chunk, steps_in_flight=steps_in_flight)
    fill(engine, boundaries)
    for index, ids in enumerate(continuations(boundaries)):
        lose_windows(engine.scheduler.cache)
        (start_of_replay,) = check(engine, [ids], oracle, answers)
        assert 0 < start_of_replay < boundaries[index]
    assert engine.scheduler.stats().outcome_tokens["repaired"] > 0


def test_the_step_that_sizes_the_pool_scores_a_whole_sequences_entries(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, seen = select_entries, set[tuple[int, torch.Size]]()
    settings = Settings.parse(
        model=str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=40,
        max_num_seqs=3,
        kv_cache_memory_bytes="8MiB",
    )
    setup = ModelSetup(settings.engine_config())
    runner = setup.allocate(setup.pool_bytes())

    def watched(
        q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, *rest: Any, **how: Any
    ):
        seen.add((len(q), slots.shape))
        return choose(q, weights, keys, slots, *rest, **how)

    monkeypatch.setattr(compressor, "select_entries", watched)
    setup._run_worst_case(runner.tiers.device.layout)
    assert seen == {(40, (3, 256 // 4))}


def test_a_row_without_a_block_is_an_error() -> None:
    """As the window's keys would be if the scheduler had dropped a block too early."""
    case = make_case([Sequence(start=30, count=1, first_key=24)], Shape(kv_heads=1))
    nothing = LayerCache(torch.empty(0), torch.empty(0))
    batch = ForwardBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.tensor([30]),
        groups=(case.batch,),
        group_of_layer=(0,),
        caches=(nothing,),
        logit_rows=torch.tensor([0]),
    )
    metadata = AttentionMetadata(batch, RotaryEmbedding(torch.tensor([0.5]), dtype=torch.float32, interleaved=True))
    assert metadata.window(0, 7).ge(0).all()
    with pytest.raises(IndexError, match="of batch row 0 is read but has no block"):
        metadata.window(0, 8)

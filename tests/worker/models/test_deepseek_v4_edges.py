"""DeepSeek V4 at the edges of a compressed entry, and of what is cached; `test_every_boundary` has hits and repairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.checkpoints import load_oracle, prompt
from tests.engine_driver import make_engine, prompt_logprobs
from tests.kernels.paged_case import Sequence, Shape, make_case
from tests.matrices import some_daily
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from transom_core.settings.settings import Settings
from transom_kernels.latent_attention import select_entries
from transom_worker.execution.setup.model_setup import ModelSetup
from transom_worker.models.deepseek_v4 import compressor
from transom_worker.models.deepseek_v4.attention_metadata import AttentionMetadata
from transom_worker.models.layers.forward_batch import ForwardBatch, LayerCache
from transom_worker.models.layers.rotary_embedding import RotaryEmbedding

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_deepseek_v4(tmp_path_factory.mktemp("deepseek_v4_edges"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    return load_oracle(folder)


@torch.inference_mode()
def logprobs(oracle: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(oracle(torch.tensor([ids]), use_cache=False).logits[0], dim=-1)


@pytest.mark.parametrize(
    ("chunk", "block_size"), some_daily([(1, 16), (3, 4), (16, 16), (23, 32), (1024, 8)], daily=[(3, 4)])
)
def test_every_position_in_any_chunks(folder: Path, oracle: PreTrainedModel, chunk: int, block_size: int) -> None:
    lengths = (130,) if chunk == 1 else (2, 3, 4, 5, 15, 16, 17, 33, 130)
    prompts = [prompt(length, salt=length) for length in lengths]
    settings: dict[str, Any] = {
        "max_num_batched_tokens": chunk,
        "max_num_seqs": min(chunk, 3),
        "block_size": block_size,
    }
    engine = make_engine(str(folder), dtype="float32", max_model_len=256, **settings)
    for ids, steps in zip(prompts, prompt_logprobs(engine, prompts), strict=True):
        wanted = logprobs(oracle, ids)
        for position, step in enumerate(steps):
            for logprob in (step.chosen, *step.top):
                assert abs(logprob.logprob - float(wanted[position, logprob.token_id])) < TOLERANCE


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

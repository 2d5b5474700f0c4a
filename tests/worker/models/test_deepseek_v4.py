"""DeepSeek V4: checkpoints in their published form, compression ratios, number formats and errors; chunks that end anywhere in an
entry, and what the pool's size allows for. `test_every_boundary` has hits and repairs.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.checkpoints import greedy, load_oracle, prompt
from tests.engine_driver import make_engine, make_request, prompt_logprobs, run
from tests.kernels.paged_case import Sequence, Shape, make_case
from tests.matrices import some_daily
from tests.worker.models.deepseek_v4_checkpoint import HEAVY, SPARSE, make_deepseek_v4
from transom_core.config import ModelConfig
from transom_core.errors import ConfigError, ModelError
from transom_core.model_config.architecture import read_architecture, runnable
from transom_core.model_files.resolve import resolve_model
from transom_core.settings.settings import Settings
from transom_kernels.latent_attention import select_entries
from transom_worker.execution.setup.model_loading import load_model
from transom_worker.execution.setup.model_setup import ModelSetup
from transom_worker.models.deepseek_v4 import compressor
from transom_worker.models.deepseek_v4.attention_metadata import AttentionMetadata
from transom_worker.models.deepseek_v4.v4_model import published_name
from transom_worker.models.layers.forward_batch import ForwardBatch, LayerCache
from transom_worker.models.layers.rotary_embedding import RotaryEmbedding

LENGTHS = (127, 128, 129, 300)
NUM_TOKENS = 8
TOLERANCE = 1e-3
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_UNQUANTISED = ("embed", "head", "gate.weight", "compressor", "weights_proj")
_BLOCK = 128  # rows and columns with one fp8 scale
PUBLISHED: dict[str, Any] = {"compress_rates": {SPARSE: 4, HEAVY: 128}, "index_topk": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Entries of 4 and 128 tokens."""
    return make_deepseek_v4(tmp_path_factory.mktemp("deepseek_v4_published"), **PUBLISHED)


def publish(folder: Path, target: Path) -> Path:
    """The same checkpoint by the published files' tensor names and config keys."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    renamed = {published_name(name): tensor for name, tensor in tensors.items()}
    assert len(renamed) == len(tensors)
    assert {"embed.weight", "head.weight", "hc_head_fn", "norm.weight", "layers.0.attn.kv_norm.weight"} <= set(renamed)
    save_file(renamed, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    ratios = {"sliding_attention": 0, SPARSE: 4, HEAVY: 128}
    config["compress_ratios"] = [*(ratios[kind] for kind in config.pop("layer_types")), 0]
    config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
    scaling = config.pop("rope_parameters")["compress"]
    config["rope_scaling"] = {
        name: scaling[name] for name in ("rope_type", "factor", "original_max_position_embeddings")
    }
    for name in ("compress_rates", "partial_rotary_factor"):
        del config[name]
    (target / "config.json").write_text(json.dumps(config))
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (target / file.name).write_bytes(file.read_bytes())
    return target


def test_published_names_ratios_and_config(folder: Path, tmp_path: Path) -> None:
    oracle = load_oracle(folder)
    answers = [greedy(oracle, prompt(length), NUM_TOKENS).token_ids for length in LENGTHS]
    for place in (folder, publish(folder, tmp_path / "published")):
        engine = make_engine(str(place), dtype="float32", max_num_batched_tokens=200, block_size=16)
        for way in ("cold", "hit"):
            requests = [make_request(f"{way}{i}", prompt(n), max_tokens=NUM_TOKENS) for i, n in enumerate(LENGTHS)]
            found = run(engine, requests)
            assert [answer.token_ids for answer in found] == answers
        assert [answer.num_cached_tokens for answer in found] == [112, 112, 128, 288]


def test_a_table_of_experts_that_are_not_there_is_refused(folder: Path, tmp_path: Path) -> None:
    target = publish(folder, tmp_path / "published")
    tensors, table = load_file(target / "model.safetensors"), "layers.1.ffn.gate.tid2eid"
    tensors[table] += tensors[table].eq(5)
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(ModelError, match="names experts 0 to 6; the model has 6, from 0"):
        load_model(ModelConfig(model=str(target), device="cpu"))


def test_sinks_and_wrong_values_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--sinks and --chunk were given; deepseek_v4 layers have windows only"):
        make_engine(str(folder), window=16, sinks=4)
    config = resolve_model(str(folder)).config
    shape = runnable(read_architecture(config)).deepseek_v4
    assert shape is not None
    assert shape.hashed == (True, True, False, False)
    for change, message in (
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh'"),
        ({"mlp_layer_types": ["moe"]}, "for each of 4 layers"),
        ({"q_lora_rank": "many"}, "no size or number"),
    ):
        with pytest.raises(ModelError, match=message):
            read_architecture(config | change)


def scales(rows: int, columns: int, exponent: int) -> torch.Tensor:
    return torch.full((rows, columns), 127 + exponent, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def in_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two numbers a byte, a scale for each 32 of a row, and what they stand for."""
    codes = (weight[..., None] * 8 - _FP4).abs().argmin(-1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return packed, scales(len(weight), -(-weight.shape[1] // 32), -3), _FP4[codes] / 8


def in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A scale for each block of rows and columns."""
    values = (weight * 4).to(torch.float8_e4m3fn)
    return values, scales(-(-weight.shape[0] // _BLOCK), -(-weight.shape[1] // _BLOCK), -2), values.float() / 4


def test_quantised_weights_give_what_their_numbers_give(tmp_path: Path) -> None:
    plain = make_deepseek_v4(tmp_path / "plain")
    packed, rounded = tmp_path / "packed", tmp_path / "rounded"
    tensors, numbers = load_file(plain / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        numbers[name] = weight
        if weight.dim() == 2 and name.endswith(".weight") and not any(part in name for part in _UNQUANTISED):
            quantise = in_fp4 if ".experts." in name else in_fp8
            tensors[name], tensors[name.replace(".weight", ".scale")], numbers[name] = quantise(weight)
    for folder, contents in ((packed, tensors), (rounded, numbers)):
        shutil.copytree(plain, folder)
        save_file(contents, folder / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [_BLOCK, _BLOCK]}
    (packed / "config.json").write_text(json.dumps(config))
    found = []
    for folder in (packed, rounded):
        engine = make_engine(str(folder), dtype="float32")
        requests = [make_request(str(length), prompt(length), max_tokens=12) for length in (5, 40, 200)]
        found.append([answer.token_ids for answer in run(engine, requests)])
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Entries of 4 and 16 tokens, few of which are read."""
    return make_deepseek_v4(tmp_path_factory.mktemp("deepseek_v4_edges"))


@pytest.fixture(scope="module")
def oracle(small: Path) -> PreTrainedModel:
    return load_oracle(small)


@torch.inference_mode()
def logprobs(oracle: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(oracle(torch.tensor([ids]), use_cache=False).logits[0], dim=-1)


@pytest.mark.parametrize(
    ("chunk", "block_size"), some_daily([(1, 16), (3, 4), (16, 16), (23, 32), (1024, 8)], daily=[(3, 4)])
)
def test_every_position_in_any_chunks(small: Path, oracle: PreTrainedModel, chunk: int, block_size: int) -> None:
    lengths = (130,) if chunk == 1 else (2, 3, 4, 5, 15, 16, 17, 33, 130)
    prompts = [prompt(length, salt=length) for length in lengths]
    settings: dict[str, Any] = {
        "max_num_batched_tokens": chunk,
        "max_num_seqs": min(chunk, 3),
        "block_size": block_size,
    }
    engine = make_engine(str(small), dtype="float32", max_model_len=256, **settings)
    for ids, steps in zip(prompts, prompt_logprobs(engine, prompts), strict=True):
        wanted = logprobs(oracle, ids)
        for position, step in enumerate(steps):
            for logprob in (step.chosen, *step.top):
                assert abs(logprob.logprob - float(wanted[position, logprob.token_id])) < TOLERANCE


def test_the_step_that_sizes_the_pool_scores_a_whole_sequences_entries(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, seen = select_entries, set[tuple[int, torch.Size]]()
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 40, "max_num_seqs": 3, "kv_cache_memory_bytes": "8MiB"}
    settings = Settings.parse(model=str(small), dtype="float32", **sizes)
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
    batch = ForwardBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.tensor([30]),
        groups=(case.batch,),
        group_of_layer=(0,),
        caches=(LayerCache(torch.empty(0), torch.empty(0)),),
        logit_rows=torch.tensor([0]),
    )
    metadata = AttentionMetadata(batch, RotaryEmbedding(torch.tensor([0.5]), dtype=torch.float32, interleaved=True))
    assert metadata.window(0, 7).ge(0).all()
    with pytest.raises(IndexError, match="of batch row 0 is read but has no block"):
        metadata.window(0, 8)

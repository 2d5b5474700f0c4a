"""GGUF tensors under Hugging Face names: as transformers dequantises, names and permutes them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.checkpoints import load_oracle, make_checkpoint
from tests.tiny_checkpoints import load_reference, tiny_llama
from transom_core.errors import ModelError
from transom_core.model_config.architecture import read_architecture
from transom_core.model_files.gguf_header import read_gguf_header
from transom_core.model_files.resolve import resolve_model
from transom_kernels.quantised_linear import QuantisedRows
from transom_worker.models.weights import load_weights, read_groups
from transom_worker.models.weights.gguf_names import NAMES

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: Kind,
    *,
    extra: dict[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """What llama.cpp's converter makes of `model`: its names, matrices in `kind`, llama's rotary order of q and k rows,
    Gemma's norm weights with one added. Without a `tokenizer` the vocabulary is a stub."""
    config = model.config
    gemma = config.model_type.startswith("gemma")
    writer = gguf.GGUFWriter(path, config.model_type.removesuffix("_text"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_rope_freq_base(rope_theta(config))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if tokenizer is None:
        writer.add_token_list(["x"])
    else:
        _add_vocabulary(writer, tokenizer)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if gemma and name.endswith("norm.weight"):
            values = values + 1
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        data = gguf.quantize(values, kind) if values.ndim > 1 else values
        writer.add_tensor(
            llama_cpp_name(name, config.model_type), data, raw_dtype=kind if values.ndim > 1 else Kind.F32
        )
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a byte-level vocabulary with its merges and its chat template."""
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 1 for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def rope_theta(config: PretrainedConfig) -> float:
    parameters = config.rope_parameters
    return float(parameters.get("full_attention", parameters)["rope_theta"])


def llama_cpp_name(name: str, family: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = stem.split(".")[2] if ".layers." in stem else ""
    back = {theirs: ours for ours, theirs in NAMES[family].items()}
    return f"{back[stem.replace(f'.{layer}.', '.{}.', 1) if layer else stem].format(layer)}.{kind}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return load_reference(tiny_llama(tmp_path_factory.mktemp("tiny"), layers=2, tie=False))


@pytest.mark.parametrize(
    ("kind", "tolerance", "dtype"),
    [
        (Kind.F32, 0.0, "float32"),
        (Kind.F16, 1e-3, "float16"),
        (Kind.BF16, 0.0, "bfloat16"),
        (Kind.Q8_0, 0.02, "bfloat16"),
        (Kind.Q4_1, 0.2, "bfloat16"),
    ],
)
def test_what_was_written_is_read_back(
    tmp_path: Path, model: LlamaForCausalLM, kind: Kind, tolerance: float, dtype: str
) -> None:
    files = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", model, kind)))
    weights = load_weights(files)
    want = model.state_dict()
    assert set(weights.names) == set(want)
    for name in weights.names:
        got = weights(name, shape=tuple(want[name].shape))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want[name], rtol=0, atol=tolerance * want[name].abs().max().item())
    assert (files.config["dtype"], files.config["tie_word_embeddings"]) == (dtype, False)


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_what_transformers_has(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family, **FAMILIES[family])
    model = load_oracle(folder)
    files = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", model, Kind.F32)))
    weights, want = load_weights(files), dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del want["lm_head.weight"]
    assert set(weights.names) == set(want)
    for name in weights.names:
        torch.testing.assert_close(weights(name), want[name], rtol=0, atol=2e-7)
    ours, theirs = read_architecture(files.config), read_architecture(resolve_model(str(folder)).config)
    assert ours == replace(theirs, rms_norm_eps=ours.rms_norm_eps)
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)


def test_llama_3_has_its_rope_as_factors(tmp_path: Path, model: LlamaForCausalLM) -> None:
    factors = {"rope_freqs.weight": np.array([1.0, 3.5, 8.0], dtype=np.float32)}
    config = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", model, Kind.F32, extra=factors))).config
    assert (config["rope_scaling"]["rope_type"], config["rope_scaling"]["factor"]) == ("llama3", 8.0)
    assert "rope_freqs.weight" not in load_weights(resolve_model(str(tmp_path / "tiny.gguf"))).names


def test_a_tensor_outlives_the_file_and_is_its_own(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.F32)
    weights = load_weights(resolve_model(str(path)))
    norm = weights("model.norm.weight")
    norm += 1
    assert torch.equal(weights("model.norm.weight"), model.state_dict()["model.norm.weight"])
    weights.close()
    assert norm.isfinite().all()


def demo_by_transformers() -> dict[str, torch.Tensor]:
    """What `from_pretrained(gguf_file=...)` fills its model with (that function itself needs accelerate)."""
    files = resolve_model("smollm2")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**files.config))
    loaded: dict[str, torch.Tensor] = load_gguf_checkpoint(files.path, return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    return loaded


def test_the_demo_equals_transformers_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers builds it 397 times.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    oracle, weights = demo_by_transformers(), load_weights(resolve_model("smollm2"))
    assert set(weights.names) == set(oracle)
    for name in weights.names:
        assert torch.equal(weights(name), oracle[name]), name


def test_faults_are_named_by_file_and_tensor(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.Q8_0)
    weights = load_weights(resolve_model(str(path)))
    with pytest.raises(ModelError, match=r"tiny\.gguf has no tensor 'model\.layers\.7"):
        weights("model.layers.7.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"tiny\.gguf: tensor 'model\.layers\.0.*\[96, 96\]"):
        weights(Q_PROJ, shape=(96, 64))
    path.write_bytes(path.read_bytes()[:-100_000])
    with pytest.raises(ModelError, match=r"tiny\.gguf is cut off within tensor '"):
        load_weights(resolve_model(str(path)))


def test_a_tensor_that_the_family_does_not_use_is_refused(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", model, Kind.F32, extra={"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)}
    )
    assert "blk.0.attn_sinks.weight" in read_gguf_header(path).tensors
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks\.weight"):
        load_weights(resolve_model(str(path)))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
@pytest.mark.parametrize("name", [Q_PROJ, "model.layers.0.mlp.down_proj.weight"])
def test_groups_as_stored_are_the_dequantised_numbers(
    tmp_path: Path, model: LlamaForCausalLM, name: str, kind: Kind
) -> None:
    weights = load_weights(resolve_model(str(write_gguf(tmp_path / "model.gguf", model, kind))))
    wanted = weights(name)
    num_rows, width = wanted.shape
    for part in ((), (slice(5, 27),), (slice(0, num_rows), slice(32, width))):
        found = read_groups(weights, name, shape=(num_rows, width), part=part)
        assert found is not None
        rows = QuantisedRows(
            format=found.format,
            levels=found.levels,
            scales=found.scales,
            minima=found.minima,
            width=found.levels.shape[1],
        )
        assert rows.dequantised().equal(weights(name, part=part))
    assert read_groups(weights, name, shape=(num_rows, width), part=(slice(0, num_rows), slice(0, 16))) is None
    with pytest.raises(ModelError, match="shape"):
        read_groups(weights, name, shape=(num_rows + 1, width))


def test_other_types_have_no_groups_as_stored(tmp_path: Path, model: LlamaForCausalLM) -> None:
    weights = load_weights(resolve_model(str(write_gguf(tmp_path / "model.gguf", model, Kind.F16))))
    num_rows, width = weights(Q_PROJ).shape
    assert read_groups(weights, Q_PROJ, shape=(num_rows, width)) is None

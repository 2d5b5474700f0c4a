"""GGUF tensors under Hugging Face names: as transformers dequantises, names and permutes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tiny_checkpoints import load_reference, tiny_llama
from transom_worker.errors import ModelError
from transom_worker.gguf_header import read_gguf_header
from transom_worker.model_files import resolve_model
from transom_worker.weights import load_weights
from transom_worker.weights.gguf_file import _NAMES

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def write_gguf(path: Path, model: LlamaForCausalLM, kind: Kind, *, extra: str | None = None) -> Path:
    """What llama.cpp's converter makes of `model`: its names, its rotary order of q and k rows, matrices in `kind`."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list(["x"])
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        data = gguf.quantize(values, kind) if values.ndim > 1 else values
        writer.add_tensor(llama_cpp_name(name), data, raw_dtype=kind if values.ndim > 1 else Kind.F32)
    if extra:
        writer.add_tensor(extra, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_cpp_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = stem.split(".")[2] if ".layers." in stem else ""
    back = {theirs: ours for ours, theirs in _NAMES.items()}
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


def test_a_tensor_outlives_the_file_and_is_its_own(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.F32)
    weights = load_weights(resolve_model(str(path)))
    norm = weights("model.norm.weight")
    norm += 1
    assert torch.equal(weights("model.norm.weight"), model.state_dict()["model.norm.weight"])
    weights.close()
    assert norm.isfinite().all()


@pytest.fixture(scope="module")
def demo_oracle() -> dict[str, torch.Tensor]:
    """What `from_pretrained(gguf_file=...)` fills its model with (that function itself needs accelerate)."""
    files = resolve_model("smollm2")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**files.config))
    loaded: dict[str, torch.Tensor] = load_gguf_checkpoint(files.path, return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    return loaded


def test_the_demo_equals_transformers_bit_for_bit(demo_oracle: dict[str, torch.Tensor]) -> None:
    weights = load_weights(resolve_model("smollm2"))
    assert set(weights.names) == set(demo_oracle)
    for name in weights.names:
        assert torch.equal(weights(name), demo_oracle[name]), name


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


def test_a_tensor_without_a_place_is_refused(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model, Kind.F32, extra="blk.0.attn_sinks.weight")
    assert "blk.0.attn_sinks.weight" in read_gguf_header(path).tensors
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks\.weight"):
        load_weights(resolve_model(str(path)))

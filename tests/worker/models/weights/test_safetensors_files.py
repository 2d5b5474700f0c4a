"""Safetensors folders: every tensor as transformers has it, and every fault named by file and tensor."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch

from tests.tiny_checkpoints import load_reference, tiny_llama
from transom_core.errors import ModelError
from transom_core.model_files.resolve import resolve_model
from transom_worker.models.weights.load import load_weights

NORM = "model.layers.0.input_layernorm.weight"


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
    "zip": b"PK\x03\x04" + bytes(60),
    "endless header": (1 << 62).to_bytes(8, "little") + b"{}",
    "no JSON": header(b"{not json"),
    "no text": header(b"\xff\xfe"),
    "no object": header([1, 2]),
    "no shape": header({NORM: {"dtype": "F32"}}),
    "unknown type": header(entry([4], 16, dtype="PICKLE"), 16),
    "too few bytes": header(entry([5], 16), 16),
    "cut off": header(entry([4], 16), 12),
    "negative": header(entry([-4], 16), 16),
    "overflowing": header(entry([1 << 40, 1 << 40], 16), 16),
    "backwards": header(entry([4], 16, start=32), 16),
    "overlapping": header(entry([4], 16) | {"other": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, 24),
}


@pytest.mark.parametrize("contents", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_named(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(contents)
    with pytest.raises(ModelError, match=r"model\.safetensors is cut off or not safetensors"):
        read_all(tmp_path)


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

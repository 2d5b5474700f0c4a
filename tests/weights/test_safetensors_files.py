"""Safetensors folders: every tensor as transformers has it, and every fault named by file and tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tiny_checkpoints import load_reference, tiny_llama
from transom_worker.errors import ModelError
from transom_worker.model_files import resolve_model
from transom_worker.weights import load_weights

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


def test_a_missing_tensor_and_a_wrong_shape_are_named(folder: Path) -> None:
    weights = load_weights(resolve_model(str(folder)))
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.9"):
        weights("model.layers.9.input_layernorm.weight")
    with pytest.raises(ModelError, match=r"safetensors: tensor 'model\.layers\.0.*\[96\].*\[97\]"):
        weights(NORM, shape=(97,))


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

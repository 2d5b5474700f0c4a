"""Reads the text files of a model's folder, which may come from anywhere: JSON, `tokenizer.json`, chat templates, and
`model.safetensors.index.json`, which maps each tensor to its file if a model's weights are in several files.

They must be regular files of bounded size: a pipe would hang the start. They must lie in the folder, or where a hub's cache has put
them: a cloned repository can have links, and these could lead to any file of this host.
"""

import json
import stat
from pathlib import Path
from typing import Any

from transom_core.errors import ModelError

MODELOPT_FILE = "hf_quant_config.json"  # where older versions of ModelOpt say how weights are quantised
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"  # of a model whose weights are in one file
_MAX_BYTES = 256 << 20  # an index of 100,000 tensors has 10 MiB, a tokenizer 35 MiB


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file in a model's folder.

    Raises:
        ModelError: the file is missing, unreadable, not the folder's own, or not an object.
    """
    try:
        value = json.loads(read_text(path, path.parent))
    except RecursionError:
        raise ModelError(f"{path} nests arrays or objects too deeply to be read; download it again.") from None
    except ValueError as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; a JSON object is needed.")
    return value


def read_text(path: Path, folder: Path) -> str:
    """Read a file of a model's folder, which may lie in a folder below it.

    Raises:
        ModelError: the file is missing, unreadable, too large, not a regular file, not UTF-8, or a link out of the folder.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise ModelError(
                f"{path} is no regular file of at most {_MAX_BYTES >> 20} MiB (it has {status.st_size} bytes); download it again."
            )
        target = path.resolve()
        if not any(target.is_relative_to(root) for root in _roots(folder.resolve())):
            raise ModelError(
                f"{path} is a link out of the model's folder, to {target}; put a copy of that file in its place."
            )
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; the model's folder is incomplete.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None


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


def _roots(folder: Path) -> list[Path]:
    """Return where a folder's files may lie. In a hub's cache, `snapshots/<commit>/config.json` is a link into `blobs`."""
    is_snapshot = folder.parent.name == "snapshots"
    return [folder, folder.parent.parent / "blobs"] if is_snapshot else [folder]

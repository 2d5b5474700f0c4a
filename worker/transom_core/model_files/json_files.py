"""Reads the JSON files of a model's folder, which may come from anywhere: regular files of bounded size that hold an object."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from transom_core.errors import ModelError

_MAX_JSON_BYTES = 256 << 20  # an index of 100,000 tensors has 10 MiB


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file in a model's folder.

    Raises:
        ModelError: the file is missing, unreadable or not an object.
    """
    try:
        value = json.loads(_read_text(path))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; the model's folder is incomplete.") from None
    except RecursionError:
        raise ModelError(f"{path} nests arrays or objects too deeply to be read; download it again.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; a JSON object is needed.")
    return value


def _read_text(path: Path) -> str:
    """Read a small file. A pipe or a device, which may never end, is not read."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_JSON_BYTES:
        raise ModelError(
            f"{path} is no regular file of at most {_MAX_JSON_BYTES >> 20} MiB (it has {status.st_size} bytes); download it again."
        )
    return path.read_text("utf-8")

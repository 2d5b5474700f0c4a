"""The bytes of weights that one decode step of a dense model reads, from the headers of a folder of safetensors."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def bytes_of_a_step(folder: Path) -> int:
    """All tensors, except the embedding where the head has a matrix of its own: a step reads only single rows of it."""
    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        sizes |= {name: end - begin for name, (begin, end) in _offsets(path).items()}
    untied = HEAD in sizes
    return sum(size for name, size in sizes.items() if not (untied and name.endswith(EMBEDDING)))


def _offsets(path: Path) -> dict[str, tuple[int, int]]:
    """First and last byte of each tensor. The file begins with the header's length and the header in JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}

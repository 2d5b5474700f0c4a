"""A model's cache geometry from its folder: the layout that an engine would have in so much memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom_worker.config import parse_bytes
from transom_worker.errors import ConfigError
from transom_worker.kvcache.groups import GroupKind, GroupSpec
from transom_worker.kvcache.layout import ArenaLayout, GroupLayout
from transom_worker.simulate.conversations import WORKING_SET_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What the simulator needs of a model."""

    name: str
    max_model_len: int
    layout: ArenaLayout


def read_geometry(folder: Path, *, memory: str, block_size: int) -> Geometry:
    """From a folder with a `config.json`; `memory` is a size, or a multiple of the sessions' working set such as 2x.

    Raises:
        ConfigError: no such folder, a geometry that is not known, or a size that is none.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a model's config.json: {error}.") from None
    groups = _groups(config, block_size)
    memory_bytes = parse_memory(memory, groups)
    page_bytes = 2 * max(group.stride_bytes for group in groups)
    return Geometry(
        name=path.parent.name,
        max_model_len=config["max_position_embeddings"],
        layout=ArenaLayout(page_bytes=page_bytes, num_pages=memory_bytes // page_bytes, groups=groups),
    )


def parse_memory(text: str, groups: tuple[GroupLayout, ...]) -> int:
    """Bytes of the pool; `1x` are the full-length blocks of all synthetic sessions at their end."""
    if not text.endswith("x"):
        return parse_bytes(text, name="--memory")
    try:
        multiple = float(text[:-1])
    except ValueError:
        raise ConfigError(f"--memory is {text!r}; give a size such as 40GiB, or a multiple such as 2x.") from None
    token_bytes = sum(g.stride_bytes / g.spec.block_size for g in groups if g.spec.keeps_everything)
    return int(multiple * WORKING_SET_TOKENS * token_bytes)


def _groups(config: dict[str, Any], block_size: int) -> tuple[GroupLayout, ...]:
    full: list[int] = []
    sliding: list[int] = []
    for layer, kind in enumerate(config["layer_types"]):
        (full if kind == "full_attention" else sliding).append(layer)
    specs = (
        GroupSpec(name="full", kind=GroupKind.FULL, layers=tuple(full), block_size=block_size),
        GroupSpec(
            name="window",
            kind=GroupKind.WINDOW,
            layers=tuple(sliding),
            block_size=block_size,
            window=config["sliding_window"],
        ),
    )
    groups = []
    for spec in specs:
        num_bytes = sum(_row_bytes(config, layer) for layer in spec.layers) * block_size
        groups.append(GroupLayout(spec=spec, block_bytes=num_bytes, stride_bytes=num_bytes, layers=()))
    return tuple(groups)


def _row_bytes(config: dict[str, Any], layer: int) -> int:
    own = config.get("per_layer_config", {}).get(f"{layer:02}", {})
    sizes = {**config, **own}
    return int(sizes["num_key_value_heads"] * sizes["head_dim"] * 2 * 2)

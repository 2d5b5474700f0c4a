"""Reads a model's cache geometry from its folder: the KV cache layout that an engine would have in a given amount of memory.

The *working set* is the KV memory that full-attention layers need for all synthetic sessions (`conversations`) at their end.
`--memory 2x` means twice that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from transom_core.errors import ConfigError, ModelError
from transom_core.kv_cache.layout import ArenaLayout
from transom_core.model_config.architecture import read_architecture
from transom_core.settings.byte_sizes import parse_bytes
from transom_worker.planner.blocks import cache_groups
from transom_worker.planner.plan import plan_from_config
from transom_worker.simulate.conversations import WORKING_SET_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What the simulator needs to know about a model."""

    name: str
    max_model_len: int
    layout: ArenaLayout


def read_geometry(path: Path, *, memory: str, block_size: int = 16, max_num_batched_tokens: int = 8192) -> Geometry:
    """Return the geometry for a `config.json`; `path` is the file or its folder.

    `memory` is a size such as 40GiB, or a multiple such as 2x of the working set of the synthetic sessions.

    Raises:
        ModelError: there is no such file, or the model cannot be planned.
        ConfigError: the size cannot be read, or memory is too small.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _read_config(file)
    plan = plan_from_config(
        config,
        memory_bytes=_memory_bytes(memory, config, block_size),
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return Geometry(name=file.resolve().parent.name, max_model_len=plan.max_model_len, layout=plan.layout)


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}; give a folder with a config.json.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds no JSON object; give a model's config.json.")
    return config


def _memory_bytes(text: str, config: Mapping[str, Any], block_size: int) -> int:
    if not text.endswith("x"):
        return parse_bytes(text, name="--memory")
    multiple = re.fullmatch(r"(\d+(?:\.\d+)?)x", text)
    if multiple is None:
        raise ConfigError(f"--memory is {text!r}; give a size such as 40GiB, or a multiple such as 2x.")
    return int(Fraction(multiple[1]) * _working_set_bytes(config, block_size))


def _working_set_bytes(config: Mapping[str, Any], block_size: int) -> int:
    """Return the bytes of `1x`: the blocks of full-attention layers for all synthetic sessions at their end."""
    architecture = read_architecture(config)
    groups = cache_groups(architecture, block_size=block_size, dtype=architecture.served_dtype)
    full = [group for group in groups if group.spec.keeps_everything]
    if not full:
        raise ConfigError(
            "--memory is a multiple of full-length blocks, and every layer of this model slides; give bytes."
        )
    return sum(WORKING_SET_TOKENS // group.spec.block_size * group.block_bytes for group in full)

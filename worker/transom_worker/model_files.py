"""From a model's name to its files and its `config.json`, whatever the format on disk. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A resolved model: a folder of safetensors, or one GGUF file.

    `config` is `config.json`, or GGUF metadata translated to the same names; `generation_config` likewise ({} if absent).
    """

    name: str
    path: Path  # the folder, or the .gguf file
    is_gguf: bool
    config: dict[str, Any]
    generation_config: dict[str, Any]


def resolve_model(name: str) -> ModelFiles:
    """Find a model by folder, .gguf file, `smollm2` (the demo package) or Hugging Face id (needs network).

    Raises:
        ModelError: nothing of that name, or its files are incomplete; says what was looked for and what to do.
    """
    raise NotImplementedError

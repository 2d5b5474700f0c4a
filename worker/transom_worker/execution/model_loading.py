"""From settings to a model in memory: files, shape, device, number format, weights."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from transom_worker.config import ModelConfig
from transom_worker.errors import ConfigError
from transom_worker.execution.load_progress import OnProgress, ProgressWeights, fetched
from transom_worker.model_config.architecture import Architecture, read_architecture, runnable, with_windows
from transom_worker.model_config.sharding import check_size
from transom_worker.model_files.resolve import ModelFiles, resolve_model
from transom_worker.models.model import Model
from transom_worker.models.registry import build_model
from transom_worker.parallel import Parallel
from transom_worker.weights import load_weights

logger = logging.getLogger("transom.worker")

ONE_RANK = Parallel()

# A decoder's own, as far as they are weights: not a picture encoder's, no frequencies.
_IN_A_LAYER = re.compile(r"(language_model\.)?(model\.)?(language_model\.)?layers\.\d+\.(?!.*inv_freq)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its device, and what the engine must know of it."""

    model: Model
    architecture: Architecture
    dtype: str  # torch's name of it
    device: torch.device
    eos_token_ids: tuple[int, ...]


def load_model(
    config: ModelConfig, parallel: Parallel = ONE_RANK, on_progress: OnProgress | None = None
) -> LoadedModel:
    """Resolve a model and load a rank's part of it.

    Raises:
        ModelError: its files are missing, broken or of an unknown family.  ConfigError: the device is not there, or
            the model cannot be shared by so many ranks.
    """
    files = fetched(lambda: resolve_model(config.model), on_progress) if on_progress else resolve_model(config.model)
    architecture = model_architecture(files, config)
    check_size(architecture, parallel.size)
    device, dtype = choose_device(config.device), choose_dtype(config.dtype, architecture)
    weights = load_weights(files)
    if on_progress is not None:
        weights = ProgressWeights(weights, on_progress)
    try:
        model = build_model(
            architecture,
            weights,
            dtype=getattr(torch, dtype),
            device=device,
            quantization=config.quantization,
            parallel=parallel,
        )
        _warn_of_unread(weights.unread, files.path)
    finally:
        weights.close()
    return LoadedModel(
        model=model, architecture=architecture, dtype=dtype, device=device, eos_token_ids=eos_token_ids(files)
    )


def _warn_of_unread(unread: Sequence[str], path: Path) -> None:
    """A tensor of a layer that no code asked for, such as a bias that the config does not mention, may mean a wrong model."""
    names = [name for name in unread if _IN_A_LAYER.match(name)]
    if names:
        logger.warning(
            "%s: %d tensors of its layers are not used, such as %s; config.json and weights may not belong together.",
            path,
            len(names),
            ", ".join(names[:3]),
        )


def model_architecture(files: ModelFiles, config: ModelConfig) -> Architecture:
    """The checkpoint's shape, with the windows and chunks that the settings ask for."""
    architecture = runnable(read_architecture(files.config))
    if config.window is None and config.chunk is None:
        return architecture
    return with_windows(
        architecture, window=config.window, sinks=config.sinks, chunk=config.chunk, pattern=config.window_pattern
    )


def choose_device(device: str) -> torch.device:
    """The device for a setting; `auto` takes CUDA where there is one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no CUDA device; use --device cpu or auto.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def choose_dtype(dtype: str, architecture: Architecture) -> str:
    """The number format for a setting; `auto` is bfloat16, float32 for a float32 checkpoint."""
    return architecture.served_dtype if dtype == "auto" else dtype


def eos_token_ids(files: ModelFiles) -> tuple[int, ...]:
    """Ids that end a text: those of the generation config, else of the config, else of its text decoder's."""
    inner = files.config.get("text_config")
    for config in (files.generation_config, files.config, inner if isinstance(inner, Mapping) else {}):
        ids = _id_list(config, "eos_token_id")
        if ids:
            return ids
    return ()


def set_threads(num_threads: int | None, *, ranks_on_host: int = 1) -> None:
    """Threads of this process's CPU operators; None: every core that it may run on, which the ranks on a host share.

    OMP_NUM_THREADS does not count: Ray sets it to an actor's share of CPUs, usually 1.
    """
    torch.set_num_threads(num_threads or max(1, num_usable_cores() // ranks_on_host))


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _id_list(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = config.get(key)
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)

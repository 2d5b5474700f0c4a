"""LoRA adapters in PEFT's format: for a checkpoint, with the merged checkpoint beside it; and such with any bytes as weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from transom_core.contract import Adapter
from transom_core.model_files.adapter_files import CONFIG_FILE, WEIGHTS_FILE, resolve_adapter

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}


def write_adapter(folder: Path, weights: bytes = b"weights", **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(CONFIG | config))
    (folder / WEIGHTS_FILE).write_bytes(weights)
    return str(folder)


def adapt_checkpoint(model: Path, folder: Path) -> tuple[Adapter, Path]:
    """A random adapter of a checkpoint's projections, as large as these, and a checkpoint into which it is merged."""
    merged = shutil.copytree(model, folder / "merged")
    weights, matrices = load_file(merged / "model.safetensors"), {}
    targets = ("q_proj.weight", "o_proj.weight", "out_proj.weight", "up_proj.weight", "down_proj.weight")
    random = torch.Generator().manual_seed(1)
    for name in (name for name in weights if name.endswith(targets)):
        num_rows, num_columns = weights[name].shape
        a = torch.randn(CONFIG["r"], num_columns, generator=random)
        b = torch.randn(num_rows, CONFIG["r"], generator=random) * weights[name].std() / 6
        weights[name] += CONFIG["lora_alpha"] / CONFIG["r"] * b @ a
        module = f"base_model.model.{name.removesuffix('.weight')}"
        matrices |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    path = write_adapter(folder / "adapter")
    save_file(matrices, folder / "adapter" / WEIGHTS_FILE)
    identity = resolve_adapter(path, max_rank=CONFIG["r"]).identity()
    return Adapter(name="adapter", path=path, identity=identity), merged


def make_adapter(folder: Path) -> Adapter:
    """An adapter that has its folder's name and content of its own."""
    path = write_adapter(folder, folder.name.encode())
    return Adapter(name=folder.name, path=path, identity=resolve_adapter(path, max_rank=8).identity())

"""Quantised checkpoints in their published formats, and their numbers as transformers dequantises them."""

import json
import shutil
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.worker.models.quantised_formats import FORMATS, fp4

_FILE = "model.safetensors"
_NOT_QUANTISED = ("embed", "lm_head", "norm", "mlp.gate.", "mixer.gate.", "router.", "conv1d")

Tensors = dict[str, torch.Tensor]


def to_mxfp4(plain: Path, packed: Path) -> None:
    """Copy a gpt-oss checkpoint with its experts in MXFP4; those of `plain` are rounded likewise."""
    tensors, rounded = load_file(plain / _FILE), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = pack_mxfp4(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        rounded[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    _write(plain, packed, tensors, rounded, {"quant_method": "mxfp4"})


def to_format(plain: Path, packed: Path, name: str) -> None:
    """Copy a checkpoint with its linear layers in one of `FORMATS`; those of `plain` are rounded likewise."""
    tensors, rounded, format = load_file(plain / _FILE), {}, FORMATS[name]
    matrices = [
        name for name in tensors if name.endswith(".weight") and not any(part in name for part in _NOT_QUANTISED)
    ]
    for matrix in matrices:
        stored, rounded[matrix] = format.stored(tensors.pop(matrix))
        tensors |= {matrix.removesuffix(".weight") + key: tensor for key, tensor in stored.items()}
    _write(plain, packed, tensors, rounded, format.config)


to_fp8 = partial(to_format, name="fp8 blocks")


def to_fp8_stacks(plain: Path, packed: Path, *, input_first: bool = False) -> None:
    """As `to_fp8`, with the experts of a layer in two stacks, as Mistral 4 and Qwen3-VL have them."""
    to_fp8(plain, packed)
    tensors = load_file(packed / _FILE)
    for name in [name for name in tensors if ".experts.0.down_proj.weight" in name]:
        prefix, _, kind = name.partition("0.down_proj.weight")
        count = sum(one.startswith(prefix) and one.endswith(f"down_proj.weight{kind}") for one in tensors)
        for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            rows = [
                torch.cat([tensors.pop(f"{prefix}{expert}.{part}.weight{kind}") for part in parts])
                for expert in range(count)
            ]
            whole = torch.stack(rows)
            tensors[f"{prefix}{stack}{kind}"] = whole.mT.contiguous() if input_first else whole
    save_file(tensors, packed / _FILE, metadata={"format": "pt"})


def pack_mxfp4(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [experts, rows, groups, 16] and scales [experts, rows, groups] of `stack` [experts, rows, columns]."""
    stored, _ = fp4(stack.flatten(0, 1), group=32, writer="compressed")
    packed, scales = (stored[name].unflatten(0, stack.shape[:2]) for name in (".weight_packed", ".weight_scale"))
    return packed.unflatten(2, (-1, 16)), scales


def _write(plain: Path, packed: Path, tensors: Tensors, rounded: Tensors, quantization: dict[str, object]) -> None:
    shutil.copytree(plain, packed, dirs_exist_ok=True)
    save_file(tensors, packed / _FILE, metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(load_file(plain / _FILE) | rounded, plain / _FILE, metadata={"format": "pt"})

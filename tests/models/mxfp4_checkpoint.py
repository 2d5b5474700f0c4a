"""gpt-oss as it is published, its experts packed as MXFP4, and the same numbers unpacked by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what three bits say; the fourth is the sign
_GROUP = 32
_FILE = "model.safetensors"


def pack_experts(plain: Path, packed: Path) -> None:
    """Copy a checkpoint with its experts rounded to MXFP4 and packed, and round those of `plain` itself likewise."""
    tensors, rounded = load_file(plain / _FILE), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = pack(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        rounded[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    shutil.copytree(plain, packed, dirs_exist_ok=True)
    _write(packed, tensors, {"quantization_config": {"quant_method": "mxfp4"}})
    _write(plain, {name: tensor for name, tensor in tensors.items() if tensor.dtype != torch.uint8} | rounded, {})


def _write(folder: Path, tensors: dict[str, torch.Tensor], more: dict[str, object]) -> None:
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))


def pack(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [..., rows, groups, 16] and scales [..., rows, groups] of `values` [..., rows, columns], rounded to nearest."""
    groups = values.float().unflatten(-1, (-1, _GROUP))
    exponent = groups.abs().amax(-1).log2().floor() - 2  # so that the largest is below 8; 6 and more become 6
    distance = (groups.abs()[..., None] * torch.exp2(-exponent)[..., None, None] - torch.tensor(_NUMBERS)).abs()
    codes = distance.argmin(-1) + 8 * (groups < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponent + 127).to(torch.uint8)

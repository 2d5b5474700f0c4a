"""DeepSeek V4 in the number formats of the published files: fp8 matrices, experts in 4 bits, scales that are powers of two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import prompt
from tests.engine_driver import make_engine, make_request, run
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_UNQUANTISED = ("embed", "head", "gate.weight", "compressor", "weights_proj")
_BLOCK = 128


def scales(rows: int, columns: int, exponent: int) -> torch.Tensor:
    return torch.full((rows, columns), 127 + exponent, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def in_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two numbers a byte, a scale for each 32 of a row, and what they stand for."""
    codes = (weight[..., None] * 8 - _FP4).abs().argmin(-1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return packed, scales(len(weight), -(-weight.shape[1] // 32), -3), _FP4[codes] / 8


def in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A scale for each block of rows and columns."""
    values = (weight * 4).to(torch.float8_e4m3fn)
    return values, scales(-(-weight.shape[0] // _BLOCK), -(-weight.shape[1] // _BLOCK), -2), values.float() / 4


def test_quantised_weights_give_what_their_numbers_give(tmp_path: Path) -> None:
    plain = make_deepseek_v4(tmp_path / "plain")
    packed, rounded = tmp_path / "packed", tmp_path / "rounded"
    tensors, numbers = load_file(plain / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        numbers[name] = weight
        if weight.dim() == 2 and name.endswith(".weight") and not any(part in name for part in _UNQUANTISED):
            quantise = in_fp4 if ".experts." in name else in_fp8
            tensors[name], tensors[name.replace(".weight", ".scale")], numbers[name] = quantise(weight)
    for folder, contents in ((packed, tensors), (rounded, numbers)):
        shutil.copytree(plain, folder)
        save_file(contents, folder / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [_BLOCK, _BLOCK]}
    (packed / "config.json").write_text(json.dumps(config))
    found = []
    for folder in (packed, rounded):
        engine = make_engine(str(folder), dtype="float32")
        requests = [make_request(str(length), prompt(length), max_tokens=12) for length in (5, 40, 200)]
        found.append([answer.token_ids for answer in run(engine, requests)])
    assert found[0] == found[1]

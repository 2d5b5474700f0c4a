"""MXFP4 and fp8 in blocks: the numbers are transformers' own, and whole checkpoints look as if they were not quantised."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from transom_core.errors import ModelError
from transom_core.model_files.resolve import resolve_model
from transom_worker.models.weights.checkpoint import Weights
from transom_worker.models.weights.dequantise import dequantise_blockwise, dequantise_mxfp4
from transom_worker.models.weights.load import load_weights

EXPERTS, IN, OUT = 3, 96, 40
NAME = "model.layers.0.mlp.experts.down_proj"
MATRIX = "model.layers.0.self_attn.q_proj"
MXFP4 = {"quant_method": "mxfp4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 32]}


def packed(seed: int = 0) -> dict[str, torch.Tensor]:
    """Blocks and scales; byte 255 as a scale stands for no number."""
    generator = torch.Generator().manual_seed(seed)
    shape = (EXPERTS, OUT, IN // 32)
    return {
        f"{NAME}_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator),
        f"{NAME}_scales": torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator),
    }


def fp8(scale: str = f"{MATRIX}.weight_scale_inv") -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        f"{MATRIX}.weight": (torch.randn(40, 96) * 50).to(torch.float8_e4m3fn),
        scale: torch.rand(3, 3) + 0.1,
    }


def write(folder: Path, tensors: dict[str, torch.Tensor], quantization: Any) -> Path:
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama"} | ({} if quantization is None else {"quantization_config": quantization})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def open_weights(folder: Path, tensors: dict[str, torch.Tensor], quantization: Any) -> Weights:
    return load_weights(resolve_model(str(write(folder, tensors, quantization))))


def test_mxfp4_is_transformers_bit_for_bit() -> None:
    tensors = packed()
    ours = dequantise_mxfp4(tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"])
    wanted = convert_moe_packed_tensors(tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"])
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours.transpose(1, 2), wanted)


def test_fp8_blocks_are_transformers() -> None:
    values, scales = torch.randn(64, 96).to(torch.float8_e4m3fn), torch.rand(4, 3)
    ours = dequantise_blockwise(values, scales, (16, 32))
    theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(values, scales, torch.float32)
    assert torch.equal(ours, theirs)
    exponents = torch.randint(110, 140, (4, 3), dtype=torch.uint8)
    for scale in (exponents, exponents.view(torch.float8_e8m0fnu)):
        theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(values, exponents, torch.float32)
        assert torch.equal(dequantise_blockwise(values, scale, (16, 32)), theirs)


def test_4_bit_matrices_are_transformers() -> None:
    values = torch.randint(-128, 128, (10, 48), dtype=torch.int8)
    scales = torch.randint(110, 140, (10, 3), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(values, scales.view(torch.uint8), torch.float32)
    assert torch.equal(dequantise_blockwise(values, scales, (128, 128)), theirs)
    odd = (slice(3, 8), slice(31, 70))
    assert torch.equal(dequantise_blockwise(values, scales, (128, 128), odd), theirs[odd])


@pytest.mark.parametrize("columns", [slice(None), slice(0, 1), slice(31, 65), slice(89, 90)], ids=str)
@pytest.mark.parametrize("rows", [slice(None), slice(0, 1), slice(15, 34), slice(39, 40)], ids=str)
def test_blocks_cut_off_at_the_edges(rows: slice, columns: slice) -> None:
    """40 rows and 90 columns in blocks of 16 and 32; any part alone is that of the whole."""
    values, scales = torch.randn(40, 90).to(torch.float8_e4m3fn), torch.rand(3, 3)
    wanted = torch.tensor(
        [[float(values[i, j]) * float(scales[i // 16, j // 32]) for j in range(90)] for i in range(40)]
    )
    torch.testing.assert_close(dequantise_blockwise(values, scales, (16, 32), (rows, columns)), wanted[rows, columns])


def test_a_checkpoint_shows_unquantised_names_and_shapes(tmp_path: Path) -> None:
    tensors = packed() | {"model.norm.weight": torch.ones(4)}
    weights = open_weights(tmp_path, tensors, MXFP4)
    assert weights.names == (NAME, "model.norm.weight")
    wanted = convert_moe_packed_tensors(tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"])
    assert torch.equal(weights(NAME, shape=(EXPERTS, IN, OUT)), wanted)
    assert torch.equal(weights(NAME, shape=(EXPERTS, IN, OUT), part=(slice(1, 2),)), wanted[1:2])
    odd = (slice(1, 2), slice(5, 33), slice(1, 4))
    assert torch.equal(weights(NAME, shape=(EXPERTS, IN, OUT), part=odd), wanted[odd])
    assert torch.equal(weights("model.norm.weight", part=(slice(1, 3),)), torch.ones(2))
    weights.close()


@pytest.mark.parametrize("scale", [f"{MATRIX}.weight_scale_inv", f"{MATRIX}.scale"])
def test_both_names_of_a_scale(tmp_path: Path, scale: str) -> None:
    tensors = fp8(scale)
    weights = open_weights(tmp_path, tensors, FP8)
    assert weights.names == (f"{MATRIX}.weight",)
    wanted = dequantise_blockwise(tensors[f"{MATRIX}.weight"], tensors[scale], (16, 32))
    assert torch.equal(weights(f"{MATRIX}.weight", shape=(40, 96)), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{NAME}_scales": torch.zeros(3, 40, 3)}, r"safetensors: tensor '.*down_proj' cannot be .* must be uint8"),
        (
            {f"{NAME}_blocks": torch.zeros(3, 40, 3, 16)},
            r"safetensors: tensor '.*down_proj' cannot be .* must be uint8",
        ),
    ],
    ids=["numbers as scales", "numbers as blocks"],
)
def test_broken_mxfp4_is_named(tmp_path: Path, change: dict[str, torch.Tensor], message: str) -> None:
    """`test_wrong_weights` has missing tensors and wrong shapes."""
    weights = open_weights(tmp_path, packed() | change, MXFP4)
    with pytest.raises(ModelError, match=message):
        weights(NAME, shape=(EXPERTS, IN, OUT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{MATRIX}.weight_scale_inv": torch.ones(2, 3)}, r"need scales \[3, 3\], not \[2, 3\]"),
        (
            {f"{MATRIX}.weight": torch.zeros(96).to(torch.float8_e4m3fn)},
            r"q_proj\.weight' has shape \[96\].*\[40, 96\]",
        ),
        ({f"{MATRIX}.weight_scale_inv": None}, r"q_proj\.weight' holds float8_e4m3fn, and neither"),
    ],
)
def test_broken_fp8_is_named(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = {name: tensor for name, tensor in (fp8() | change).items() if tensor is not None}
    with pytest.raises(ModelError, match=message):
        open_weights(tmp_path, tensors, FP8)(f"{MATRIX}.weight", shape=(40, 96))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq"}, r"quantised by 'awq'; supported: 'mxfp4', 'fp8'"),
        ({}, "quantised by None"),
        ("gptq", "quantised by 'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size \[0, 128\]"),
    ],
)
def test_other_quantisations_are_refused(tmp_path: Path, quantization: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_weights(tmp_path, fp8(), quantization)


def test_8_bit_tensors_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    weights = open_weights(tmp_path, fp8(), None)
    with pytest.raises(
        ModelError, match=r"model\.safetensors: tensor '.*weight' holds float8_e4m3fn.*give the unquantised"
    ):
        weights(f"{MATRIX}.weight")

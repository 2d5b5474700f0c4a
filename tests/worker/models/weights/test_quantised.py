"""Quantised checkpoints: the numbers are those of their writers, and whole checkpoints look as if they were not quantised."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.present import present
from tests.worker.models.quantised_formats import FORMATS, compressed
from transom_core.errors import ModelError
from transom_core.model_files.resolve import resolve_model
from transom_kernels.quantised_linear import GpuRows, QuantisedRows
from transom_worker.models.weights.checkpoint import Weights
from transom_worker.models.weights.load import load_weights
from transom_worker.models.weights.quantised_tensor import QuantisedTensor

EXPERTS, IN, OUT = 3, 96, 40
NAME = "model.layers.0.mlp.experts.down_proj"
MATRIX = "model.layers.0.self_attn.q_proj"
MXFP4 = {"quant_method": "mxfp4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 32]}
ALL = slice(None)
PARTS = [
    (ALL, ALL), (slice(3, 21),), (slice(16, 32), slice(128, 256)), (ALL, slice(32, 96)), (slice(5, 6), slice(31, 70)),
    (ALL, slice(96, 250)),
]  # fmt: skip


def packed(seed: int = 0) -> dict[str, torch.Tensor]:
    """Blocks and scales; byte 255 as a scale stands for no number."""
    generator = torch.Generator().manual_seed(seed)
    shape = (EXPERTS, OUT, IN // 32)
    return {
        f"{NAME}_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator),
        f"{NAME}_scales": torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator),
    }


def fp8() -> dict[str, torch.Tensor]:
    numbers, scales = (torch.randn(40, 96) * 50).to(torch.float8_e4m3fn), torch.rand(3, 3) + 0.1
    return {f"{MATRIX}.weight": numbers, f"{MATRIX}.weight_scale_inv": scales}


def write(folder: Path, tensors: dict[str, torch.Tensor], quantization: Any) -> Path:
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama"} | ({} if quantization is None else {"quantization_config": quantization})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def open_weights(folder: Path, tensors: dict[str, torch.Tensor], quantization: Any) -> Weights:
    return load_weights(resolve_model(str(write(folder, tensors, quantization))))


def fp8_tensor(values: torch.Tensor, scales: torch.Tensor, group: tuple[int, int]) -> QuantisedTensor:
    return QuantisedTensor(shape=tuple(values.shape), kind="fp8", numbers=values, scales=scales, group=group)


def test_fp8_blocks_are_transformers() -> None:
    values, scales = torch.randn(64, 96).to(torch.float8_e4m3fn), torch.rand(4, 3)
    ours = fp8_tensor(values, scales, (16, 32)).dequantised()
    theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(values, scales, torch.float32)
    assert torch.equal(ours, theirs)
    exponents = torch.randint(110, 140, (4, 3), dtype=torch.uint8)
    for scale in (exponents, exponents.view(torch.float8_e8m0fnu)):
        theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(values, exponents, torch.float32)
        assert torch.equal(fp8_tensor(values, scale, (16, 32)).dequantised(), theirs)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_what_its_tool_wrote(tmp_path: Path, name: str) -> None:
    """Dequantised, whole and in parts that cut words and groups, and as the CPU kernels hold it where they can."""
    wanted_format = FORMATS[name]
    tensors, rounded = wanted_format.stored(torch.randn(48, 256, generator=torch.Generator().manual_seed(2)))
    folder = write(tmp_path, {MATRIX + key: tensor for key, tensor in tensors.items()}, wanted_format.config)
    weights = load_weights(resolve_model(str(folder)), in_memory=True)
    matrix, shape = f"{MATRIX}.weight", (48, 256)
    assert weights.names == (matrix,)
    assert weights.keeps_groups
    torch.testing.assert_close(weights(matrix, shape=shape), rounded, rtol=1e-6, atol=0)
    for part in PARTS:
        torch.testing.assert_close(weights(matrix, shape=shape, part=part), rounded[part], rtol=1e-6, atol=0)
        held = weights.groups(matrix, shape=shape, part=part)
        start, stop, _ = (part[1] if len(part) > 1 else ALL).indices(256)
        if wanted_format.held is None or start % 32 or stop % 32:
            assert held is None
            continue
        assert isinstance(held, QuantisedRows)
        assert held.format == wanted_format.held
        # float16 rounds scales of bfloat16 not at all, and minima by 2 ** -12
        bound = 2**-11 * rounded.abs().max() if held.minima is not None else 1e-6
        assert (held.dequantised() - rounded[part]).abs().max() <= bound
    assert weights.unread == ()


@pytest.mark.parametrize("name", FORMATS)
def test_gpus_hold_what_their_kernels_have(tmp_path: Path, name: str) -> None:
    """All but groups of 16 integers; scales of groups are rounded to bfloat16. With activation order, only whole rows."""
    tensors, rounded = FORMATS[name].stored(torch.randn(48, 256, generator=torch.Generator().manual_seed(2)))
    folder = write(tmp_path, {MATRIX + key: tensor for key, tensor in tensors.items()}, FORMATS[name].config)
    weights = load_weights(resolve_model(str(folder)), for_gpu=True)
    found = [weights.groups(f"{MATRIX}.weight", shape=(48, 256), part=part) for part in PARTS]
    if name in ("w4a16 16", "ct fp8 blocks"):
        assert found == [None] * len(PARTS)
        return
    assert found[0] is not None
    assert (found[3] is None) == (name.endswith("order"))
    for part, held in zip(PARTS, found, strict=True):
        if held is not None:
            torch.testing.assert_close(held.dequantised(), rounded[part], rtol=2**-8, atol=1e-7)


def test_a_checkpoint_shows_unquantised_names_and_shapes(tmp_path: Path) -> None:
    tensors = packed() | {"model.norm.weight": torch.ones(4)}
    weights = open_weights(tmp_path, tensors, MXFP4)
    assert weights.names == (NAME, "model.norm.weight")
    wanted = convert_moe_packed_tensors(tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"], dtype=torch.float32)
    assert torch.equal(weights(NAME, shape=(EXPERTS, IN, OUT)), wanted)
    assert torch.equal(weights(NAME, shape=(EXPERTS, IN, OUT), part=(slice(1, 2),)), wanted[1:2])
    odd = (slice(1, 2), slice(5, 33), slice(1, 4))
    assert torch.equal(weights(NAME, shape=(EXPERTS, IN, OUT), part=odd), wanted[odd])
    assert torch.equal(weights("model.norm.weight", part=(slice(1, 3),)), torch.ones(2))
    weights.close()


def test_groups_without_activation_order(tmp_path: Path) -> None:
    tensors, rounded = FORMATS["w4a16 32"].stored(torch.randn(48, 256))
    tensors[".weight_g_idx"] = torch.full((256,), -1, dtype=torch.int32)
    config = compressed("pack-quantized", 4, "group", group_size=32, actorder="group")
    weights = open_weights(tmp_path, {MATRIX + key: tensor for key, tensor in tensors.items()}, config)
    torch.testing.assert_close(weights(f"{MATRIX}.weight", shape=(48, 256)), rounded)


def test_zero_points_of_a_wrong_shape_are_named(tmp_path: Path) -> None:
    tensors, _ = FORMATS["w8a8 asym"].stored(torch.randn(48, 256))
    tensors[".weight_zero_point"] = tensors[".weight_zero_point"][1:]
    config = FORMATS["w8a8 asym"].config
    weights = open_weights(tmp_path, {MATRIX + key: tensor for key, tensor in tensors.items()}, config)
    with pytest.raises(ModelError, match=r"weight_zero_point' has shape \[47, 1\]"):
        weights(f"{MATRIX}.weight", shape=(48, 256))


@pytest.mark.parametrize("name", ["w4a16 channel", "w4a16 channel asym", "w8a8 asym", "ct fp8 blocks"])
def test_sizes_that_fill_no_word_and_no_group(tmp_path: Path, name: str) -> None:
    tensors, rounded = FORMATS[name].stored(torch.randn(43, 90))
    folder = write(tmp_path, {MATRIX + key: tensor for key, tensor in tensors.items()}, FORMATS[name].config)
    weights = load_weights(resolve_model(str(folder)), in_memory=True)
    for part in ((ALL, ALL), (slice(41, 43), slice(64, 90))):
        torch.testing.assert_close(weights(f"{MATRIX}.weight", shape=(43, 90), part=part), rounded[part])
        held = weights.groups(f"{MATRIX}.weight", shape=(43, 90), part=part)
        if FORMATS[name].held:
            assert held is not None
            torch.testing.assert_close(held.dequantised(), rounded[part], rtol=0, atol=2e-3)


def test_modelopts_own_file_says_how(tmp_path: Path) -> None:
    stored, rounded = FORMATS["modelopt fp8"].stored(torch.randn(40, 96))
    folder = write(tmp_path, {MATRIX + key: tensor for key, tensor in stored.items()}, None)
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(config))
    torch.testing.assert_close(load_weights(resolve_model(str(folder)))(f"{MATRIX}.weight", shape=(40, 96)), rounded)


def test_the_text_decoders_config_says_how(tmp_path: Path) -> None:
    folder = write(tmp_path, fp8(), None)
    for config in ({"text_config": {"quantization_config": FP8}}, {"compression_config": FP8}):
        (folder / "config.json").write_text(json.dumps(config))
        assert load_weights(resolve_model(str(folder)))(f"{MATRIX}.weight").dtype == torch.float32


@pytest.mark.parametrize(("name", "scale"), [("input_scale", 0.5), ("activation_scale", 0.5), ("none", 0.0)])
def test_the_scale_by_which_gpus_round_inputs(tmp_path: Path, name: str, scale: float) -> None:
    """Regression: the name that transformers writes was not known, so that rows were rounded by scales of their own."""
    stored, config = FORMATS["fp8 tensor"].stored(torch.randn(48, 256)), FORMATS["fp8 tensor"].config
    tensors = {MATRIX + suffix: tensor for suffix, tensor in stored[0].items()}
    folder = write(tmp_path, tensors | {f"{MATRIX}.{name}": torch.tensor(0.5)}, config)
    rows = load_weights(resolve_model(str(folder)), for_gpu=True).groups(f"{MATRIX}.weight", shape=(48, 256))
    assert isinstance(rows, GpuRows)
    assert present(rows.input_scales).tolist() == [scale] * 48


@pytest.mark.parametrize("part", ["scales", "blocks"])
def test_broken_mxfp4_is_named(tmp_path: Path, part: str) -> None:
    """`test_wrong_weights` has missing tensors and wrong shapes."""
    tensors = packed()
    tensors[f"{NAME}_{part}"] = tensors[f"{NAME}_{part}"].float()
    weights = open_weights(tmp_path, tensors, MXFP4)
    with pytest.raises(ModelError, match=r"safetensors: tensor '.*down_proj' cannot be .* must be uint8"):
        weights(NAME, shape=(EXPERTS, IN, OUT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{MATRIX}.weight_scale_inv": torch.ones(2, 3)}, r"need scales \[3, 3\] .*, not \[2, 3\]"),
        (
            {f"{MATRIX}.weight": torch.zeros(96).to(torch.float8_e4m3fn)},
            r"q_proj\.weight' has shape \[96\].*\[40, 96\]",
        ),
        ({f"{MATRIX}.weight_scale_inv": None}, r"q_proj\.weight' holds float8_e4m3fn, which cannot"),
    ],
)
def test_broken_fp8_is_named(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = {name: tensor for name, tensor in (fp8() | change).items() if tensor is not None}
    with pytest.raises(ModelError, match=message):
        open_weights(tmp_path, tensors, FP8)(f"{MATRIX}.weight", shape=(40, 96))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"by 'bitsandbytes'; supported: 'mxfp4', 'fp8'.*'awq'",
        ),
        ({}, "quantised by None"),
        ("hqq", "quantised by 'hqq'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' .*supported: 'gemm'"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 .*supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        (compressed("marlin-24", 4, "group", group_size=128), "format 'marlin-24'"),
        (compressed("pack-quantized", 3, "group", group_size=128), "bits 3"),
        (compressed("pack-quantized", 4, "channel") | {"transform_config": {"u": 1}}, "transform_config"),
        (compressed("pack-quantized", 4, "channel") | {"sparsity_config": {"format": "sparse-24"}}, "'sparse-24'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
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

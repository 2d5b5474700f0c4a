"""Matrices as the tools that quantise checkpoints write them, and the numbers that they stand for, in plain torch.

Each `Format` follows the published layout of one tool. `stored(weight)` rounds a matrix [N, K] and returns the tensors by what
follows the layer's name, and the rounded matrix in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Stored = tuple[Tensors, torch.Tensor]

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
# Which of eight neighbours lies at each place of a word, from its lowest bits on.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_LARGEST_FP8 = 448.0


@dataclass(frozen=True)
class Format:
    """A way to store matrices. `held` is the format of the CPU kernels that holds it; None: it is widened."""

    config: dict[str, Any]
    stored: Callable[[torch.Tensor], Stored]
    held: str | None = None


def words(numbers: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack unsigned integers [A, B] along B: [A, B * bits / 32] int32; `places[i]` is which neighbour lies at place i."""
    each = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % each)).unflatten(1, (-1, each))
    chosen = padded if places is None else padded[..., list(places)]
    total = (chosen << (bits * torch.arange(each))).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def integers(
    weight: torch.Tensor,
    bits: int,
    group: int,
    *,
    zeros: bool,
    of_column: torch.Tensor | None = None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to unsigned integers [N, K] with scales [N, G] and zero points [N, G]; the last are the rounded numbers."""
    of_column = torch.arange(weight.shape[1]) // group if of_column is None else of_column
    parts = [weight[:, of_column == index] for index in range(int(of_column.max()) + 1)]
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    if zeros:
        low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
        high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
        scale = ((high - low) / most).to(dtype)
        zero = (-low / scale.float()).round().clamp(1, most).int()
    else:
        scale = (torch.stack([part.abs().amax(1) for part in parts], 1) / (middle - 0.5)).to(dtype)
        zero = torch.full(scale.shape, middle, dtype=torch.int32)
    each_scale, each_zero = scale.float()[:, of_column], zero[:, of_column]
    numbers = ((weight / each_scale).round() + each_zero).clamp(0, most).int()
    return numbers, scale, zero, (numbers - each_zero) * each_scale


def awq(weight: torch.Tensor, group: int) -> Stored:
    """AutoAWQ's `gemm`: words of eight neighbouring outputs."""
    numbers, scale, zero, rounded = integers(weight, 4, group, zeros=True, dtype=torch.float16)
    tensors = {
        ".qweight": words(numbers.T, 4, _AWQ_COLUMNS),
        ".qzeros": words(zero.T, 4, _AWQ_COLUMNS),
        ".scales": scale.T.contiguous(),
    }
    return tensors, rounded


def gptq(
    weight: torch.Tensor, group: int, *, bits: int = 4, zeros: bool = False, order: bool = False, version: int = 1
) -> Stored:
    """AutoGPTQ's and GPTQModel's: words of neighbouring inputs; version 1 stores zero points less 1."""
    width = weight.shape[1]
    of_column = torch.arange(width) // group
    if order:
        of_column = of_column[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
    numbers, scale, zero, rounded = integers(weight, bits, group, zeros=zeros, of_column=of_column, dtype=torch.float16)
    tensors = {
        ".qweight": words(numbers, bits).T.contiguous(),
        ".qzeros": words(zero.T - int(version == 1), bits),
        ".scales": scale.T.contiguous(),
        ".g_idx": of_column.int(),
    }
    return tensors, rounded


def packed(
    weight: torch.Tensor, group: int | None, *, bits: int = 4, zeros: bool = False, order: bool = False
) -> Stored:
    """compressed-tensors' `pack-quantized`: words of neighbouring inputs; zero points in words of neighbouring outputs."""
    width = weight.shape[1]
    of_column = torch.arange(width) // (group or width)
    if order:
        of_column = of_column[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
    numbers, scale, zero, rounded = integers(
        weight, bits, group or width, zeros=zeros, of_column=of_column, dtype=torch.bfloat16
    )
    tensors = {
        ".weight_packed": words(numbers, bits),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        tensors[".weight_zero_point"] = words(zero.T, bits).T.contiguous()
    if order:
        tensors[".weight_g_idx"] = of_column.int()
    return tensors, rounded


def int8(weight: torch.Tensor, *, zeros: bool = False) -> Stored:
    """compressed-tensors' `int-quantized`: signed bytes, a scale for each output."""
    numbers, scale, zero, rounded = integers(weight, 8, weight.shape[1], zeros=zeros, dtype=torch.bfloat16)
    tensors = {".weight": (numbers - 128).to(torch.int8), ".weight_scale": scale}
    return tensors | ({".weight_zero_point": (zero - 128).to(torch.int8)} if zeros else {}), rounded


def fp8(
    weight: torch.Tensor,
    group: tuple[int, int] | None,
    *,
    name: str = ".weight_scale",
    shape: tuple[int, ...] | None = None,
) -> Stored:
    """fp8 in blocks of rows and columns, or in one; `shape` is that of the stored scales if they have another."""
    rows, columns = group or weight.shape
    rows, columns = min(rows, len(weight)), min(columns, weight.shape[1])
    row_of, column_of = torch.arange(len(weight)) // rows, torch.arange(weight.shape[1]) // columns
    scale = torch.zeros(int(row_of[-1]) + 1, int(column_of[-1]) + 1)
    for at in torch.cartesian_prod(torch.arange(len(scale)), torch.arange(scale.shape[1])).tolist():
        scale[at[0], at[1]] = weight[row_of == at[0]][:, column_of == at[1]].abs().amax() / _LARGEST_FP8
    each = scale[row_of][:, column_of]
    values = (weight / each).to(torch.float8_e4m3fn)
    extra = {".input_scale": torch.ones(1), ".k_scale": torch.ones(1)} if name == ".weight_scale" else {}
    return {".weight": values, name: scale if shape is None else scale.reshape(shape), **extra}, values.float() * each


def fp4(weight: torch.Tensor, *, group: int, writer: str) -> Stored:
    """NVFP4 (groups of 16 with fp8 scales, and a factor of all) and MXFP4 (groups of 32 with powers of two)."""
    groups = weight.float().unflatten(1, (-1, group))
    largest = groups.abs().amax(-1)
    factor = float(weight.abs().amax()) / (6.0 * _LARGEST_FP8)
    if group == 16:
        stored = (largest / 6.0 / factor).to(torch.float8_e4m3fn)
        scale = stored.float() * factor
    else:
        exponent = (largest.log2().floor() - 2).clamp(-127, 127)
        stored, scale = (exponent + 127).to(torch.uint8), exponent.exp2()
    codes = ((groups / scale[..., None])[..., None] - _FP4).abs().argmin(-1).flatten(1)
    numbers = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    rounded = (_FP4[codes].unflatten(1, (-1, group)) * scale[..., None]).flatten(1)
    if writer == "modelopt":
        return {".weight": numbers, ".weight_scale": stored, ".weight_scale_2": torch.tensor(factor)}, rounded
    factors = {".weight_global_scale": torch.tensor([1 / factor])} if group == 16 else {}
    return {".weight_packed": numbers, ".weight_scale": stored, **factors}, rounded


def compressed(format: str, bits: int, strategy: str, *, kind: str = "int", **weights: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one kind of layers."""
    scheme = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "group_size": None} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def _gptq_config(bits: int, group: int, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True} | settings


def _modelopt(algorithm: str, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]} | settings


FORMATS: dict[str, Format] = {
    **{
        f"awq {group}": Format(
            {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True},
            partial(awq, group=group),
            held="int4_min",
        )
        for group in (32, 64, 128)
    },
    "gptq": Format(_gptq_config(4, 32), partial(gptq, group=32), held="int4"),
    "gptq asym": Format(_gptq_config(4, 64, sym=False), partial(gptq, group=64, zeros=True), held="int4_min"),
    "gptq v2": Format(
        _gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"),
        partial(gptq, group=32, zeros=True, version=2),
        held="int4_min",
    ),
    "gptq int8": Format(_gptq_config(8, -1), lambda w: gptq(w, w.shape[1], bits=8), held="int8"),
    "gptq order": Format(_gptq_config(4, 32, desc_act=True), partial(gptq, group=32, order=True)),
    "gptq order, all": Format(_gptq_config(4, -1, desc_act=True), lambda w: gptq(w, w.shape[1]), held="int4"),
    **{
        f"w4a16 {group or 'channel'}{' asym' * zeros}": Format(
            compressed("pack-quantized", 4, "group" if group else "channel", group_size=group, symmetric=not zeros),
            partial(packed, group=group, zeros=zeros),
            held="int4_min" if zeros else "int4",
        )
        for group in (32, 64, 128, None)
        for zeros in (False, True)
    },
    "w4a16 order": Format(
        compressed("pack-quantized", 4, "group", group_size=32, actorder="group"), partial(packed, group=32, order=True)
    ),
    "w4a16 16": Format(compressed("pack-quantized", 4, "group", group_size=16), partial(packed, group=16)),
    "w8a16": Format(
        compressed("pack-quantized", 8, "group", group_size=32), partial(packed, group=32, bits=8), held="int8"
    ),
    "w8a8": Format(compressed("int-quantized", 8, "channel"), int8, held="int8"),
    "w8a8 asym": Format(
        compressed("int-quantized", 8, "channel", symmetric=False), partial(int8, zeros=True), held="int8_min"
    ),
    "fp8 blocks": Format(
        {"quant_method": "fp8", "weight_block_size": [32, 32]}, partial(fp8, group=(32, 32), name=".weight_scale_inv")
    ),
    "fp8 tensor": Format(
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        partial(fp8, group=None, name=".weight_scale_inv", shape=()),
    ),
    "fbgemm": Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, partial(fp8, group=(1, 1 << 30))),
    "ct fp8 tensor": Format(
        compressed("float-quantized", 8, "tensor", kind="float"), partial(fp8, group=None, shape=(1,))
    ),
    "ct fp8 channel": Format(
        compressed("float-quantized", 8, "channel", kind="float"), partial(fp8, group=(1, 1 << 30))
    ),
    "ct fp8 blocks": Format(
        compressed("float-quantized", 8, "block", kind="float", block_structure=[32, 16]), partial(fp8, group=(32, 16))
    ),
    "modelopt fp8": Format(_modelopt("FP8"), partial(fp8, group=None, shape=())),
    "modelopt nvfp4": Format(
        _modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}),
        partial(fp4, group=16, writer="modelopt"),
    ),
    "nvfp4": Format(
        compressed("nvfp4-pack-quantized", 4, "tensor_group", kind="float", group_size=16),
        partial(fp4, group=16, writer="compressed"),
    ),
    "ct mxfp4": Format(
        compressed("mxfp4-pack-quantized", 4, "group", kind="float", group_size=32),
        partial(fp4, group=32, writer="compressed"),
    ),
}

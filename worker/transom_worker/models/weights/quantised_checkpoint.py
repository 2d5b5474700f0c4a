"""Reads a safetensors checkpoint whose larger tensors are MXFP4 or fp8 in blocks, and returns dequantised tensors.

- MXFP4 experts are stored as `X_blocks` and `X_scales`, each expert [out, in]. They appear as `X`, [experts, in, out], which is
  how transformers stores them unquantised.
- fp8 matrices are stored as `X.weight` with `X.weight_scale_inv` or, in DeepSeek's own files, with `X.scale`. If `X.weight` is
  int8, the matrix is MXFP4: each byte holds two numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from transom_core.errors import ModelError
from transom_worker.models.weights.checkpoint import ALL, WHOLE, Mxfp4Tensors, Part, WeightsView, check_shape
from transom_worker.models.weights.dequantise import GROUP, dequantise_blockwise, dequantise_mxfp4
from transom_worker.models.weights.safetensors_files import SafetensorsWeights

_METHODS = ("mxfp4", "fp8")
_DEFAULT_BLOCK = (128, 128)


def open_quantised(plain: SafetensorsWeights, config: Any) -> QuantisedWeights:
    """Return the weights of `plain`, dequantised as the config.json's `quantization_config` (`config`) says.

    Raises:
        ModelError: the quantisation method, or one of its settings, is not supported.
    """
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if method not in _METHODS:
        raise ModelError(
            f"config.json says that the weights are quantised by {method!r}; supported: {', '.join(map(repr, _METHODS))}. "
            "Give the unquantised checkpoint."
        )
    block = config.get("weight_block_size", _DEFAULT_BLOCK)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        raise ModelError(
            f"config.json has weight_block_size {block!r} in its quantization_config; two numbers of rows and columns with one "
            "scale are needed, such as [128, 128]."
        )
    return QuantisedWeights(plain, (block[0], block[1]))


class QuantisedWeights(WeightsView):
    """Weights that dequantise the tensors with scales, and give all others as stored."""

    def __init__(self, plain: SafetensorsWeights, block: tuple[int, int]) -> None:
        super().__init__(plain)
        self._plain, self._block = plain, block
        stored_names = set(plain.names)
        self._mxfp4_experts = {
            name.removesuffix(part) for part in ("_blocks", "_scales") for name in stored_names if name.endswith(part)
        }
        self._scale_of = {name: scale for name in stored_names if (scale := _scale_name(name, stored_names))}
        internal_names = set(self._scale_of.values()) | {
            f"{name}_{part}" for name in self._mxfp4_experts for part in ("blocks", "scales")
        }
        self.names = tuple(sorted((stored_names - internal_names) | self._mxfp4_experts))

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """Read one tensor; see `Weights.__call__`."""
        if name in self._mxfp4_experts:
            return self._experts(name, shape, part)
        if name in self._scale_of:
            return self._matrix(name, shape, part)
        return super().__call__(name, shape=shape, part=part)

    def mxfp4(self, name: str, *, shape: tuple[int, ...], part: Part = WHOLE) -> Mxfp4Tensors | None:
        """Return one tensor as stored, if it is stored in MXFP4; see `Weights.mxfp4`."""
        if name in self._mxfp4_experts:
            experts, columns, rows = (*part, *[ALL] * (3 - len(part)))
            blocks, scales, _ = self._blocks_and_scales(name, shape)
            return _whole_groups(blocks[experts, rows].flatten(-2), scales[experts, rows], columns)
        if name not in self._scale_of or shape[1] % GROUP or (values := self._plain.read(name)).dtype != torch.int8:
            return None
        check_shape(values, (shape[0], shape[1] // 2), name=name, file=self._plain.file_of(name))
        scale = self._scale_of[name]
        scales = check_shape(
            self._plain.read(scale), (shape[0], shape[1] // GROUP), name=scale, file=self._plain.file_of(scale)
        )
        rows, columns = (*part, *[ALL] * (2 - len(part)))
        return _whole_groups(values.view(torch.uint8)[rows], scales.view(torch.uint8)[rows], columns)

    def _experts(self, name: str, shape: tuple[int, ...] | None, part: Part) -> torch.Tensor:
        experts_part, into, out = (*part, *[ALL] * (3 - len(part)))
        blocks, scales, file = self._blocks_and_scales(name, shape)
        try:
            return dequantise_mxfp4(blocks[experts_part, out], scales[experts_part, out], into).transpose(-1, -2)
        except (ValueError, IndexError) as error:
            raise ModelError(f"{file}: tensor {name!r} cannot be dequantised: {error}.") from None

    def _blocks_and_scales(self, name: str, shape: tuple[int, ...] | None) -> tuple[torch.Tensor, torch.Tensor, Path]:
        """Return the blocks and scales of experts, and the file of the blocks; `shape` is [experts, in, out] of the experts."""
        file = self._plain.file_of(f"{name}_blocks")
        blocks, scales = self._plain.read(f"{name}_blocks"), self._plain.read(f"{name}_scales")
        if shape is not None:
            experts, columns, rows_each = shape
            packed_shape = (experts, rows_each, columns // GROUP, GROUP // 2)
            check_shape(blocks, packed_shape, name=f"{name}_blocks", file=file)
            check_shape(scales, packed_shape[:-1], name=f"{name}_scales", file=self._plain.file_of(f"{name}_scales"))
        return blocks, scales, file

    def _matrix(self, name: str, shape: tuple[int, ...] | None, part: Part) -> torch.Tensor:
        file, values = self._plain.file_of(name), self._plain.read(name)
        halves = 2 if values.dtype == torch.int8 else 1
        if shape is not None:
            check_shape(values, (*shape[:-1], shape[-1] // halves), name=name, file=file)
        try:
            return dequantise_blockwise(values, self._plain.read(self._scale_of[name]), self._block, part)
        except ValueError as error:
            raise ModelError(f"{file}: tensor {name!r} cannot be dequantised: {error}.") from None


def _whole_groups(blocks: torch.Tensor, scales: torch.Tensor, columns: slice) -> Mxfp4Tensors | None:
    """Return `columns` of an MXFP4 tensor as stored; None if they do not begin and end at groups of 32."""
    start, stop, _ = columns.indices(2 * blocks.shape[-1])
    if start % GROUP or stop % GROUP:
        return None
    return blocks[..., start // 2 : stop // 2], scales[..., start // GROUP : stop // GROUP]


def _scale_name(name: str, stored_names: set[str]) -> str | None:
    """Return the name of the stored scales of a stored weight; None if it has none."""
    candidates = (f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale")
    return next((scale for scale in candidates if scale in stored_names), None) if name.endswith(".weight") else None

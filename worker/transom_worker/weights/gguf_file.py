"""A GGUF file of a family in `gguf_names`: tensors dequantised to float32 under their Hugging Face names."""

from __future__ import annotations

import math
import re

import gguf
import numpy as np
import numpy.typing as npt
import torch

from transom_worker.errors import ModelError
from transom_worker.gguf_header import GgufTensor, read_gguf_header
from transom_worker.model_files import ModelFiles
from transom_worker.weights.checkpoint import ALL_ROWS, check_shape
from transom_worker.weights.gguf_names import NAMES, NORMS_PLUS_ONE, NOT_WEIGHTS, PAIRS_SIDE_BY_SIDE, PARAMETERS

_PERMUTED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
# The package dequantises 16 rows at a time; longer rows (whole quantisation blocks) make fewer, larger numpy calls.
_ROW_BYTES = 1 << 17
_MATRIX = 2  # dimensions; a stack of all experts has more

Floats = npt.NDArray[np.float32]


class GgufWeights:
    """Tensors of one GGUF file, read through a memory map and dequantised when asked for.

    Raises:
        ModelError: the file is cut off, or holds a tensor of an unknown name or type; names both.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._path = files.path
        self._config, self._family = files.config, str(files.config["model_type"])
        header = read_gguf_header(files.path)
        self._tensors = {self._hf_name(name): t for name, t in header.tensors.items() if name not in NOT_WEIGHTS}
        self._data: npt.NDArray[np.uint8] = np.memmap(files.path, dtype=np.uint8, mode="r")
        for tensor in self._tensors.values():
            if tensor.offset + self._num_bytes(tensor) > self._data.size:
                raise ModelError(f"{files.path} is cut off within tensor {tensor.name!r}; download it again.")
        self.names = tuple(sorted(self._tensors))

    @property
    def unread(self) -> tuple[str, ...]:
        """Unknown names are refused when the file is opened, so that none is left to tell of."""
        return ()

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, rows: slice = ALL_ROWS) -> torch.Tensor:
        """One tensor in float32, or some of a stack's matrices; a matrix is dequantised as a whole. See `Weights`."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._path} has no tensor {name!r}; the checkpoint is incomplete or of another family.")
        check_shape(torch.empty(tensor.shape, device="meta"), shape, name=name, file=self._path)
        if len(tensor.shape) > _MATRIX:
            return torch.from_numpy(self._dequantise(tensor, rows))
        values = self._dequantise(tensor)
        heads = _PERMUTED.get(name.split(".")[-2])
        if heads and self._family in PAIRS_SIDE_BY_SIDE:
            values = _half_split(values, self._config[heads])
        if self._family in NORMS_PLUS_ONE and name.endswith("norm.weight"):
            values -= 1.0
        return torch.from_numpy(values)[rows]

    def close(self) -> None:
        """Drop the map; tensors that were read stay valid."""
        self._data = np.empty(0, dtype=np.uint8)

    def _hf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        layer = re.search(r"\.(\d+)\.", name)
        known = NAMES[self._family].get(stem.replace(layer[0], ".{}.", 1) if layer else stem)
        if known is None or kind not in ("weight", "bias"):
            raise ModelError(
                f"{self._path} holds tensor {name!r}, which no {self._family} model of Transom's has a place for."
            )
        ours = known.format(layer[1]) if layer else known
        return ours if ours.endswith(PARAMETERS) else f"{ours}.{kind}"

    def _num_bytes(self, tensor: GgufTensor) -> int:
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.ggml_type)]
        except (KeyError, ValueError):
            raise ModelError(f"{self._path}: tensor {tensor.name!r} has unknown type {tensor.ggml_type}.") from None
        if math.prod(tensor.shape[-1:]) % int(block):
            raise ModelError(f"{self._path}: tensor {tensor.name!r} has rows that are no whole blocks; it is broken.")
        return math.prod(tensor.shape) // int(block) * int(size)

    def _dequantise(self, tensor: GgufTensor, rows: slice = ALL_ROWS) -> Floats:
        """Of a stack, `rows` are matrices, each of whole quantisation blocks."""
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        raw = self._data[tensor.offset : tensor.offset + self._num_bytes(tensor)]
        shape = tensor.shape
        if rows != ALL_ROWS:
            raw = raw.reshape(shape[0], -1)[rows]
            shape = (raw.shape[0], *shape[1:])
            raw = raw.reshape(-1)
        try:
            values = gguf.dequantize(_long_rows(raw, gguf.GGML_QUANT_SIZES[kind][1]), kind)
        except NotImplementedError:
            raise ModelError(
                f"{self._path}: tensor {tensor.name!r} has type {kind.name}, which cannot be read."
            ) from None
        # F32 comes back as a view of the file: copy, so that the tensor is writable memory of its own
        return np.array(values, dtype=np.float32, copy=kind is gguf.GGMLQuantizationType.F32).reshape(shape)


def _long_rows(raw: npt.NDArray[np.uint8], block_bytes: int) -> npt.NDArray[np.uint8]:
    """The same bytes as rows of about _ROW_BYTES, each of whole blocks; as one row if they do not divide."""
    num_blocks = raw.size // block_bytes
    num_rows = max(1, raw.size // _ROW_BYTES)
    while num_blocks % num_rows:
        num_rows -= 1
    return raw.reshape(num_rows, -1)


def _half_split(weight: Floats, num_heads: int) -> Floats:
    """Undo llama.cpp's order of rows in each head (rotary pairs side by side): first halves, then second halves."""
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)

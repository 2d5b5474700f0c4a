"""A GGUF file of a family in `gguf_names`: tensors dequantised to float32 under their Hugging Face names."""

from __future__ import annotations

import math
import re

import gguf
import numpy as np
import numpy.typing as npt
import torch

from transom_worker.errors import ModelError
from transom_worker.model_files.gguf_header import GgufTensor, read_gguf_header
from transom_worker.model_files.resolve import ModelFiles
from transom_worker.weights.checkpoint import ALL, WHOLE, Part, check_shape
from transom_worker.weights.gguf_names import NAMES, NORMS_PLUS_ONE, NOT_WEIGHTS, PAIRS_SIDE_BY_SIDE, PARAMETERS

_PERMUTED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
# The package dequantises 16 rows at a time; longer rows (whole quantisation blocks) make fewer, larger numpy calls.
_ROW_BYTES = 1 << 17

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

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """One tensor in float32, or a part of it; see `Weights`."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._path} has no tensor {name!r}; the checkpoint is incomplete or of another family.")
        check_shape(torch.empty(tensor.shape, device="meta"), shape, name=name, file=self._path)
        heads = _PERMUTED.get(name.split(".")[-2])
        if heads and self._family in PAIRS_SIDE_BY_SIDE:
            return torch.from_numpy(self._whole_heads(tensor, self._config[heads], part))
        values = self._dequantise(tensor, part)
        if self._family in NORMS_PLUS_ONE and name.endswith("norm.weight"):
            values -= 1.0
        return torch.from_numpy(values)

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

    def _whole_heads(self, tensor: GgufTensor, num_heads: int, part: Part) -> Floats:
        """The part of a tensor whose rows are put in order head by head."""
        rows, *columns = part or (ALL,)
        start, stop, _ = rows.indices(tensor.shape[0])
        width = tensor.shape[0] // num_heads
        first, end = start // width, -(-stop // width)
        values = _half_split(self._dequantise(tensor, (slice(first * width, end * width), *columns)), end - first)
        return values[start - first * width : stop - first * width]

    def _dequantise(self, tensor: GgufTensor, part: Part) -> Floats:
        """Reads the quantisation blocks that hold the part; every row is of whole ones."""
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        length, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = self._data[tensor.offset : tensor.offset + self._num_bytes(tensor)]
        *leading, columns = (*part, *[ALL] * (len(tensor.shape) - len(part)))
        start, stop, _ = columns.indices(tensor.shape[-1])
        first = start // length
        chosen = raw.reshape(*tensor.shape[:-1], -1, num_bytes)[(*leading, slice(first, -(-stop // length)))]
        try:
            values = gguf.dequantize(_long_rows(chosen.reshape(-1), num_bytes), kind)
        except NotImplementedError:
            raise ModelError(
                f"{self._path}: tensor {tensor.name!r} has type {kind.name}, which cannot be read."
            ) from None
        # F32 comes back as a view of the file: copy, so that the tensor is writable memory of its own
        own = np.array(values, dtype=np.float32, copy=kind is gguf.GGMLQuantizationType.F32)
        return own.reshape(*chosen.shape[:-2], -1)[..., start - first * length : stop - first * length]


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

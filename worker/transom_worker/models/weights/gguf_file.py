"""Reads a GGUF file's tensors by their Hugging Face names (`gguf_names`), dequantised to float32 or as stored in
groups (Q8_0, Q4_0 and Q4_1)."""

import logging
import math
import re
from typing import TypeVar

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind

from transom_core.errors import ModelError
from transom_core.model_files.gguf_header import GgufTensor, read_gguf_header
from transom_core.model_files.resolve import ModelFiles
from transom_kernels.quantised_linear import GROUP, QuantisedRows
from transom_worker.models.weights.checkpoint import ALL, WHOLE, Part, Weights, check_shape
from transom_worker.models.weights.gguf_names import INTERLEAVED_ROPE, NAMES, NORMS_PLUS_ONE, NOT_WEIGHTS, PARAMETERS

_STORED_KINDS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1)
_REORDERED_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
# The gguf package dequantises 16 rows at a time; with rows of this many bytes it makes fewer and larger numpy calls.
_ROW_BYTES = 1 << 17

logger = logging.getLogger("transom.worker")

Floats = npt.NDArray[np.float32]
Number = TypeVar("Number", np.float32, np.uint8)


class GgufWeights(Weights):
    """The tensors of one GGUF file, read through a memory map and dequantised on request.

    Raises:
        ModelError: the file is cut off, or holds a tensor of an unknown name or type. The message names file and tensor.
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
        """Return (): opening the file already refuses tensors that no model of the family uses, so none needs a warning."""
        return ()

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """Read one tensor in float32, or a part of it; see `Weights.__call__`."""
        tensor = self._find(name, shape)
        num_heads = self._num_reordered(name)
        if num_heads:
            return torch.from_numpy(self._whole_heads(tensor, num_heads, part))
        values = self._dequantise(tensor, part)
        if self._family in NORMS_PLUS_ONE and name.endswith("norm.weight"):
            values -= 1.0
        return torch.from_numpy(values)

    def groups(self, name: str, *, shape: tuple[int, int], part: Part = WHOLE) -> QuantisedRows | None:
        """Return a matrix, or a part of it, as stored; None if it is not stored in groups, or the part cuts a group."""
        tensor = self._find(name, shape)
        kind = Kind(tensor.ggml_type)
        if kind not in _STORED_KINDS:
            return None
        rows, columns = (*part, *[ALL] * (2 - len(part)))
        first, end, _ = columns.indices(tensor.shape[1])
        if first % GROUP or end % GROUP:
            logger.info(
                "%s: %s is dequantised, because a rank's columns cut its groups of %d.", self._path, name, GROUP
            )
            return None
        start, stop, _ = rows.indices(tensor.shape[0])
        num_heads = self._num_reordered(name)
        head_rows = tensor.shape[0] // num_heads if num_heads else 1
        first_head, end_head = start // head_rows, -(-stop // head_rows)
        blocks = self._blocks(tensor)[first_head * head_rows : end_head * head_rows, first // GROUP : end // GROUP]
        if num_heads:
            flat = np.ascontiguousarray(blocks).reshape(len(blocks), -1)
            blocks = _half_split(flat, end_head - first_head).reshape(blocks.shape)
        return _stored_groups(blocks[start - first_head * head_rows : stop - first_head * head_rows], kind)

    def close(self) -> None:
        """Drop the memory map; tensors that were read stay valid."""
        self._data = np.empty(0, dtype=np.uint8)

    def _hf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        layer = re.search(r"\.(\d+)\.", name)
        hf_pattern = NAMES[self._family].get(stem.replace(layer[0], ".{}.", 1) if layer else stem)
        if hf_pattern is None or kind not in ("weight", "bias"):
            raise ModelError(f"{self._path} holds tensor {name!r}, which Transom's {self._family} model does not use.")
        hf_name = hf_pattern.format(layer[1]) if layer else hf_pattern
        return hf_name if hf_name.endswith(PARAMETERS) else f"{hf_name}.{kind}"

    def _find(self, name: str, shape: tuple[int, ...] | None) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._path} has no tensor {name!r}; the checkpoint is incomplete or of another family.")
        check_shape(torch.empty(tensor.shape, device="meta"), shape, name=name, file=self._path)
        return tensor

    def _num_reordered(self, name: str) -> int:
        """Return the number of heads whose rows llama.cpp has reordered in this tensor; 0 if it has reordered none."""
        heads = _REORDERED_HEADS.get(name.split(".")[-2])
        return int(self._config[heads]) if heads and self._family in INTERLEAVED_ROPE else 0

    def _num_bytes(self, tensor: GgufTensor) -> int:
        try:
            block, size = gguf.GGML_QUANT_SIZES[Kind(tensor.ggml_type)]
        except (KeyError, ValueError):
            raise ModelError(f"{self._path}: tensor {tensor.name!r} has unknown type {tensor.ggml_type}.") from None
        if math.prod(tensor.shape[-1:]) % int(block):
            raise ModelError(f"{self._path}: tensor {tensor.name!r} has rows of incomplete blocks; the file is broken.")
        return math.prod(tensor.shape) // int(block) * int(size)

    def _whole_heads(self, tensor: GgufTensor, num_heads: int, part: Part) -> Floats:
        """Return a part of a tensor whose rows llama.cpp has reordered within each head.

        The method reads whole heads, restores the order of their rows, and cuts out the part.
        """
        rows, *columns = part or (ALL,)
        start, stop, _ = rows.indices(tensor.shape[0])
        width = tensor.shape[0] // num_heads
        first, end = start // width, -(-stop // width)
        values = _half_split(self._dequantise(tensor, (slice(first * width, end * width), *columns)), end - first)
        return values[start - first * width : stop - first * width]

    def _blocks(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes, [its axes, bytes of a block]; the last of its axes counts quantisation blocks."""
        _, num_bytes = gguf.GGML_QUANT_SIZES[Kind(tensor.ggml_type)]
        raw = self._data[tensor.offset : tensor.offset + self._num_bytes(tensor)]
        return raw.reshape(*tensor.shape[:-1], -1, num_bytes)

    def _dequantise(self, tensor: GgufTensor, part: Part) -> Floats:
        """Return a part in float32. Only the quantisation blocks that hold it are read; every row consists of whole blocks."""
        kind = Kind(tensor.ggml_type)
        length, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        *leading, columns = (*part, *[ALL] * (len(tensor.shape) - len(part)))
        start, stop, _ = columns.indices(tensor.shape[-1])
        first = start // length
        chosen = self._blocks(tensor)[(*leading, slice(first, -(-stop // length)))]
        try:
            values = gguf.dequantize(_long_rows(chosen.reshape(-1), num_bytes), kind)
        except NotImplementedError:
            raise ModelError(
                f"{self._path}: tensor {tensor.name!r} has type {kind.name}, which cannot be read."
            ) from None
        # `gguf.dequantize` returns F32 as a view of the file, so it is copied: `__call__` may change the values in place.
        own = np.array(values, dtype=np.float32, copy=kind is Kind.F32)
        return own.reshape(*chosen.shape[:-2], -1)[..., start - first * length : stop - first * length]


def _long_rows(raw: npt.NDArray[np.uint8], block_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the bytes as rows of about _ROW_BYTES each, or longer, so that all rows have the same number of whole blocks."""
    num_blocks = raw.size // block_bytes
    num_rows = max(1, raw.size // _ROW_BYTES)
    while num_blocks % num_rows:
        num_rows -= 1
    return raw.reshape(num_rows, -1)


def _half_split(weight: npt.NDArray[Number], num_heads: int) -> npt.NDArray[Number]:
    """Undo llama.cpp's order of rows in each head: neighbouring rotary pairs become all first elements, then all second ones."""
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _stored_groups(blocks: npt.NDArray[np.uint8], kind: Kind) -> QuantisedRows:
    """Split blocks [N, K / 32, bytes] into levels, scales and minima, without changing a number.

    A block holds 32 columns of a row, in bytes:

        Q8_0   scale (float16), 32 signed integers
        Q4_0   scale (float16), 16 bytes of two levels: the low halves are columns 0 to 15, the high halves columns 16 to 31
        Q4_1   scale (float16), minimum (float16), 16 bytes of two levels as in Q4_0
    """
    num_rows, num_groups, _ = blocks.shape
    head = 4 if kind is Kind.Q4_1 else 2
    factors = torch.from_numpy(np.ascontiguousarray(blocks[:, :, :head])).view(torch.float16)
    body = torch.from_numpy(np.ascontiguousarray(blocks[:, :, head:]))
    # Flipping the sign bit of a signed byte adds 128, the format's zero.
    levels = body ^ 0x80 if kind is Kind.Q8_0 else torch.cat((body & 15, body >> 4), dim=-1)
    return QuantisedRows(
        format="int8" if kind is Kind.Q8_0 else "int4" if kind is Kind.Q4_0 else "int4_min",
        levels=levels.view(num_rows, 32 * num_groups),
        scales=factors[..., 0].contiguous(),
        minima=factors[..., 1].contiguous() if kind is Kind.Q4_1 else None,
        width=32 * num_groups,
    )

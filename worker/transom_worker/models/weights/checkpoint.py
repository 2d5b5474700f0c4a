"""The interface of an open checkpoint, which every file format implements: `Weights` reads one tensor, or a part of it, by name.

- part: a range for each of a tensor's first axes, such as `(slice(0, 8), slice(64, 128))`; WHOLE is the whole tensor.
- group: 32 neighbouring columns of a row with a common scale and, in some formats, a minimum (GGUF's Q8_0, Q4_0 and Q4_1).
- MXFP4: a 4-bit format with one scale, a power of two, for each group of 32 elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from transom_core.errors import ModelError

Part = tuple[slice, ...]  # a part of a tensor: a range for each of its first axes
# MXFP4 as stored: bytes of two elements [..., N / 2], exponents [..., N / 32].
Mxfp4Tensors = tuple[torch.Tensor, torch.Tensor]
GROUP = 32  # columns that share a scale
ALL = slice(None)
WHOLE: Part = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroups:
    """A matrix [N, K] stored in groups: element = scale * (level - zero) in int8 and int4, scale * level + minimum in int4_min.

    `zero` is 128 in int8 and 8 in int4.
    """

    format: Literal["int8", "int4", "int4_min"]
    levels: torch.Tensor  # [N, K] uint8
    scales: torch.Tensor  # [N, K / 32] float16
    minima: torch.Tensor | None  # [N, K / 32] float16

    @property
    def nbytes(self) -> int:
        """Return the size in memory."""
        return self.levels.nbytes + self.scales.nbytes + (0 if self.minima is None else self.minima.nbytes)


class Weights(Protocol):
    """An open checkpoint. A tensor that was read stays valid after `close`; the caller must not write to it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the Hugging Face names of the checkpoint's tensors, as they are named after dequantisation."""
        ...

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the names of the tensors in the files that were not read yet."""
        ...

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """Return a tensor, or a part of it, on the CPU: in the checkpoint's dtype, or in float32 or bfloat16 if it was quantised.

        An unquantised tensor is a memory map of its file, unless the checkpoint was opened with `in_memory`. For a part of a
        quantised tensor, only the blocks that hold the part are dequantised. `shape` is the shape of the whole tensor.

        Raises:
            ModelError: the tensor is missing, cut off, of an unknown number format, or does not have the `shape` given. The
                message names file and tensor.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def read_mxfp4(weights: Weights, name: str, *, shape: tuple[int, ...], part: Part = WHOLE) -> Mxfp4Tensors | None:
    """Return a tensor, or a part of it, as stored, if it is stored in MXFP4 and the part has whole groups; otherwise None.

    The result has output rows first: a stack of experts [E, in, out] is returned as [E, out, in], and a matrix [out, in] as it is.

    Raises:
        ModelError: as `Weights.__call__` does.
    """
    read: Callable[..., Mxfp4Tensors | None] | None = getattr(weights, "mxfp4", None)
    return None if read is None else read(name, shape=shape, part=part)


def read_groups(weights: Weights, name: str, *, shape: tuple[int, int], part: Part = WHOLE) -> StoredGroups | None:
    """Return a matrix, or a part of it, as stored, if it is stored in groups and the part has whole groups; otherwise None.

    Raises:
        ModelError: as `Weights.__call__` does.
    """
    read: Callable[..., StoredGroups | None] | None = getattr(weights, "groups", None)
    return None if read is None else read(name, shape=shape, part=part)


def check_shape(tensor: torch.Tensor, shape: tuple[int, ...] | None, *, name: str, file: object) -> torch.Tensor:
    """Return the tensor after a check that it has `shape`, which the model's config implies.

    Raises:
        ModelError: the tensor has another shape.
    """
    if shape is not None and tuple(tensor.shape) != shape:
        raise ModelError(
            f"{file}: tensor {name!r} has shape {list(tensor.shape)}, but config.json implies {list(shape)}; "
            "weights and config belong to different models."
        )
    return tensor

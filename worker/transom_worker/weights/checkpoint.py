"""The interface of an open checkpoint, which every format implements: `Weights` reads one tensor, or a part of it, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from transom_worker.errors import ModelError

Part = tuple[slice, ...]  # of a tensor: a range of each of its first axes
Mxfp4Tensors = tuple[
    torch.Tensor, torch.Tensor
]  # MXFP4 as stored: bytes of two elements [..., N / 2], exponents [..., N / 32]
ALL = slice(None)
WHOLE: Part = ()


class Weights(Protocol):
    """An open checkpoint. A tensor stays valid after `close`; the caller must not write into it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face names of the tensors that the checkpoint holds, as they are once dequantised."""
        ...

    @property
    def unread(self) -> tuple[str, ...]:
        """Names in the files of the tensors that nobody has asked for."""
        ...

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """One tensor on the CPU, in the checkpoint's dtype (dequantised ones in float32 or bfloat16), or a part of it.

        Nothing else is read: a tensor that is not quantised is a map of its file, of a quantised one the blocks that hold the
        part are dequantised. `shape` is the whole tensor's.

        Raises:
            ModelError: missing, cut off, of an unknown number format, or not of `shape` where one is given; names file and
                tensor.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def read_mxfp4(weights: Weights, name: str, *, shape: tuple[int, ...], part: Part = WHOLE) -> Mxfp4Tensors | None:
    """A tensor or a part of it as it is stored, where that is MXFP4 and the part is of whole groups; else None.

    Rows are those of a matrix product: a stack of experts [E, in, out] comes as [E, out, in], a matrix [out, in] as it is.

    Raises:
        ModelError: as for one that is dequantised.
    """
    read: Callable[..., Mxfp4Tensors | None] | None = getattr(weights, "mxfp4", None)
    return None if read is None else read(name, shape=shape, part=part)


def check_shape(tensor: torch.Tensor, shape: tuple[int, ...] | None, *, name: str, file: object) -> torch.Tensor:
    """The tensor itself, if it has the shape that the model's config implies.

    Raises:
        ModelError: it has another shape.
    """
    if shape is not None and tuple(tensor.shape) != shape:
        raise ModelError(
            f"{file}: tensor {name!r} has shape {list(tensor.shape)}, but config.json implies {list(shape)}; "
            "weights and config belong to different models."
        )
    return tensor

"""The interface of an open checkpoint, which every file format implements: `Weights` reads one tensor, or a part of it, by name.

`WeightsView` is the base of checkpoints that read from another one, for example under other names.

- part: a range for each of a tensor's first axes, such as `(slice(0, 8), slice(64, 128))`; WHOLE is the whole tensor.
- group: 32 neighbouring columns of a row with a common scale and, in some formats, a minimum, as the CPU kernels hold them. GGUF
  stores such groups (Q8_0, Q4_0 and Q4_1); larger ones, such as AWQ's of 128 columns, are held as several with equal scales.
- MXFP4: a 4-bit format with one scale, a power of two, for each group of 32 elements of a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from transom_core.errors import ModelError
from transom_kernels.quantised_linear import StoredRows

Part = tuple[slice, ...]  # a part of a tensor: a range for each of its first axes
# MXFP4 as stored: bytes of two elements [..., N / 2], exponents [..., N / 32].
Mxfp4Tensors = tuple[torch.Tensor, torch.Tensor]
ALL = slice(None)
WHOLE: Part = ()


class Weights(ABC):
    """An open checkpoint. A tensor that was read stays valid after `close`; the caller must not write to it.

    `names` are the Hugging Face names of the checkpoint's tensors, as they are named after dequantisation.
    """

    names: tuple[str, ...]

    @property
    @abstractmethod
    def unread(self) -> tuple[str, ...]:
        """Return the names of the files' tensors that have not been read yet."""

    @property
    def keeps_groups(self) -> bool:
        """Return whether layers take matrices as stored (`groups`) unless another quantisation is requested. A GGUF file's are
        dequantised unless `gguf` is."""
        return False

    @abstractmethod
    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """Return a tensor, or a part of it, on the CPU: in the checkpoint's dtype, or in float32 or bfloat16 if it was quantised.

        An unquantised tensor is a memory map of its file, unless the checkpoint was opened with `in_memory`. For a part of a
        quantised tensor, only the blocks that hold the part are dequantised. `shape` is the shape of the whole tensor.

        Raises:
            ModelError: the tensor is missing, cut off, of an unknown number format, or does not have the `shape` given. The
                message names file and tensor.
        """

    def mxfp4(self, name: str, *, shape: tuple[int, ...], part: Part = WHOLE) -> Mxfp4Tensors | None:
        """Return a tensor, or a part of it, as stored, if it is stored in MXFP4 and the part has whole groups; otherwise None.

        The result has output rows first: a stack of experts [E, in, out] is returned as [E, out, in], and a matrix [out, in] as it
        is. Raises ModelError as `__call__` does.
        """
        return None

    def groups(self, name: str, *, shape: tuple[int, int], part: Part = WHOLE) -> StoredRows | None:
        """Return a matrix, or a part of it, in groups, if it is stored so and the part has whole groups; otherwise None.

        Raises ModelError as `__call__` does.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Close the files."""


class WeightsView(Weights):
    """The weights of another checkpoint. When `name` is requested, this reads tensor `rename(name)`; `names` and `unread` are the
    checkpoint's own names. A subclass overrides what else it changes."""

    def __init__(self, weights: Weights, rename: Callable[[str], str] = str) -> None:
        self._weights, self._rename, self.names = weights, rename, weights.names

    @property
    def unread(self) -> tuple[str, ...]:
        """See `Weights.unread`; these are the files' own names."""
        return self._weights.unread

    @property
    def keeps_groups(self) -> bool:
        """See `Weights.keeps_groups`."""
        return self._weights.keeps_groups

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None, part: Part = WHOLE) -> torch.Tensor:
        """See `Weights.__call__`."""
        return self._weights(self._rename(name), shape=shape, part=part)

    def mxfp4(self, name: str, *, shape: tuple[int, ...], part: Part = WHOLE) -> Mxfp4Tensors | None:
        """See `Weights.mxfp4`."""
        return self._weights.mxfp4(self._rename(name), shape=shape, part=part)

    def groups(self, name: str, *, shape: tuple[int, int], part: Part = WHOLE) -> StoredRows | None:
        """See `Weights.groups`."""
        return self._weights.groups(self._rename(name), shape=shape, part=part)

    def close(self) -> None:
        """Close the files."""
        self._weights.close()


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

"""What every checkpoint format offers to a model builder."""

from __future__ import annotations

from typing import Protocol

import torch

from transom_worker.errors import ModelError
from transom_worker.model_files import ModelFiles


class Weights(Protocol):
    """An open checkpoint. A tensor stays valid after `close`; the caller must not write into it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face names of the tensors that the checkpoint holds."""
        ...

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """One tensor on the CPU, in the checkpoint's dtype (dequantised ones in float32).

        Raises:
            ModelError: missing, cut off, or not of `shape` where one is given; names file and tensor.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def load_weights(files: ModelFiles) -> Weights:
    """Open a model's checkpoint; tensors are read when they are asked for.

    Raises:
        ModelError: a file is missing or broken; names it.
    """
    from transom_worker.weights.gguf_file import GgufWeights
    from transom_worker.weights.safetensors_files import SafetensorsWeights

    return GgufWeights(files) if files.is_gguf else SafetensorsWeights(files.path)


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

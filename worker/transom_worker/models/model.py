"""What execution knows of a model."""

from __future__ import annotations

from typing import Protocol

import torch

from transom_worker.layers.forward_batch import ForwardBatch
from transom_worker.models.architecture import Architecture
from transom_worker.weights import Weights

__all__ = ["Model", "Weights"]


class Model(Protocol):
    """A decoder with its weights in place."""

    @property
    def architecture(self) -> Architecture:
        """Its shape."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes that its weights hold, packed copies included."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [R, V] in float32 of `batch.logit_rows`; writes the batch's keys and values into its caches."""
        ...

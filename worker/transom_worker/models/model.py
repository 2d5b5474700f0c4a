"""What execution knows of a model."""

from __future__ import annotations

from typing import Protocol

import torch

from transom_worker.layers.forward_batch import ForwardBatch
from transom_worker.model_config.architecture import Architecture
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

    @property
    def vocab(self) -> slice:
        """The token ids whose logits this rank computes; all for one rank."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [R, V] in float32 of `batch.logit_rows` over `vocab`; writes the batch's keys and values into its caches.

        Several ranks call it at the same time with the same batch, each with caches of its own.
        """
        ...

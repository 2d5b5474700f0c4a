"""The interface of a model, as execution uses it.

Legend: R rows whose logits are wanted, N hidden width, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch

from transom_core.model_config.architecture import Architecture
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.weights import Weights

__all__ = ["Model", "Weights"]


class Model(Protocol):
    """A decoder with its weights loaded."""

    @property
    def architecture(self) -> Architecture:
        """The sizes and layers of the model."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory, packed copies included."""
        ...

    @property
    def vocab(self) -> slice:
        """The token ids whose logits this rank computes; all ids with one rank."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [R, V] in float32 of `batch.logit_rows` over `vocab`; writes the batch's keys and values into its caches.

        It is `logits` of `hidden`. All ranks call it at the same time with equal batches, each with its own caches.
        """
        ...

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Normalised hidden states [R, N] of `batch.logit_rows`, in all else as `forward`."""
        ...

    def logits(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] in float32 over `vocab` of hidden states; contains no collective."""
        ...

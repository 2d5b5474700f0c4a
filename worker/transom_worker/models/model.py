"""The interface through which execution uses a model.

Legend: R rows whose logits are requested, N hidden width, V this rank's part of the vocabulary, L labels of a classifier.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from transom_core.errors import RequestError
from transom_core.model_config.architecture import Architecture
from transom_worker.models.layers.forward_batch import ForwardBatch


def no_adapters(slot: int, path: str) -> None:
    """Refuse an adapter: the model was built without slots for any."""
    raise RequestError("This worker takes no LoRA adapters; serve with --enable-lora.", param="lora_path")


class Model(ABC):
    """A decoder with its weights loaded.

    `weight_bytes` are the bytes of the weights in memory, packed copies included. `vocab` are the token ids whose logits this rank
    computes; all ids if there is one rank. `score_LN` is a classifier's head in float32, whole on every rank. `load_adapter` copies
    the LoRA adapter at a path into a slot, and raises RequestError if it cannot (`adapter_loading`).
    """

    architecture: Architecture
    weight_bytes: int
    vocab: slice
    score_LN: torch.Tensor | None = None
    load_adapter: Callable[[int, str], None] = staticmethod(no_adapters)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return logits [R, V] in float32 of `batch.logit_rows` over `vocab`; write the batch's keys and values into its caches.

        All ranks call it at the same time with equal batches, each with its own caches.
        """
        return self.logits(self.hidden(batch))

    @abstractmethod
    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Return normalised hidden states [R, N] of `batch.logit_rows`; everything else is as in `forward`."""

    @abstractmethod
    def logits(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in float32 over `vocab` for hidden states; runs no collective."""

    @torch.inference_mode()
    def scores(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        """Return a classifier's logits [R, L] in float32 for hidden states."""
        assert self.score_LN is not None
        return torch.nn.functional.linear(hidden_RN.float(), self.score_LN)

"""The interface of a backend for recorded steps, and the comparison of a replay with a forward pass.

Legend: B sequences of a step, R logit rows (B of them in a decode step), V vocabulary.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.models.layers.forward_batch import ForwardBatch

logger = logging.getLogger("transom.worker")


@dataclass(frozen=True, slots=True)
class PolicyVariant:
    """What a decode step does in addition if some of its rows have KV policies."""

    wants_mass: bool  # it adds up attention mass by block
    passes_trained_len: bool  # it gives queries other positions (RoPE) towards sink tokens


class DecodeReplay(ABC):
    """The recorded steps of one model. `num_wrong` counts sizes that are not replayed because their recording is wrong."""

    num_wrong = 0

    @abstractmethod
    def prepare(
        self, arrays: StepArrays, policy: PolicyVariant | None, eager_batch: Callable[[], ForwardBatch]
    ) -> Callable[[], torch.Tensor] | None:
        """Write a step's inputs, and return the function that computes its logits, [R, V], which stay valid until the next step.

        If no recording can run the step, `prepare` does nothing and returns None. `policy` is None if no row has a KV policy.
        `eager_batch` makes the step's inputs for a forward pass that is not recorded.
        """

    @property
    @abstractmethod
    def token_ids(self) -> torch.Tensor:
        """The input tokens, on the device, of the step that was prepared last."""

    @property
    def num_graphs(self) -> int:
        """The number of CUDA graphs that steps may replay."""
        return 0

    @property
    def block_mass(self) -> torch.Tensor | None:
        """The attention mass [at least B, at least table columns] that the last step with KV policies has added up."""
        return None


class ReplayMismatch(Exception):
    """A replay does not compute what the forward pass computes. The backend catches this error, and steps run eagerly."""


def check_replay(what: str, replayed_BV: torch.Tensor, logits_BV: torch.Tensor, *, tolerance: float = 0.0) -> None:
    """Compare a replay with a forward pass over the same inputs; NaN equals NaN.

    `tolerance` is a share of the largest finite logit. Infinite logits must be equal in any case.

    Raises:
        ReplayMismatch: they differ by more than the tolerance.
    """
    most = float(logits_BV.abs().nan_to_num(posinf=0.0).max())
    differs = float((replayed_BV - logits_BV).abs().nan_to_num(0.0).max())
    if not torch.allclose(replayed_BV, logits_BV, rtol=0.0, atol=tolerance * most, equal_nan=True):
        raise ReplayMismatch(f"{what}: logits of up to {most:.4g} differ by up to {differs:.4g} from the forward pass")
    if differs:
        logger.info("The replay of %s differs by up to %.3g in logits of up to %.3g.", what, differs, most)

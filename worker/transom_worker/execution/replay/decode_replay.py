"""The interface of a backend that records steps and replays them, and the comparison of a replay with a forward pass.

A *recording* is a CUDA graph or, on CPUs, a program of kernels, for steps of one *size*, such as a number of sequences. It reads
its inputs at fixed addresses. Backends record decode steps and, on GPUs, small steps with prompts. For each step:

    run = replay.prepare(arrays, policy, eager_batch)    writes the step's inputs; None: the step must run eagerly
    replay.token_ids.copy_(...)                          if input tokens were sampled on the device, and the host lacks them
    logits = run()
    replay.block_mass                                    only for a step with KV policies that wants attention mass

Legend: B sequences of a step, R logit rows (B in a decode step, at most B in a step with prompts), V vocabulary.
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
    """What a decode step does in addition if some of its sequences have KV policies, which drop tokens from the KV cache."""

    wants_mass: bool  # it adds up the attention that each KV block gets, by which some policies choose what they drop
    passes_trained_len: bool  # a position exceeds the trained length, so queries read sink tokens with a smaller one


class DecodeReplay(ABC):
    """The recordings of one model. `num_wrong` counts sizes that are not replayed because their recording is wrong."""

    num_wrong = 0

    @abstractmethod
    def prepare(
        self, arrays: StepArrays, policy: PolicyVariant | None, eager_batch: Callable[[], ForwardBatch]
    ) -> Callable[[], torch.Tensor] | None:
        """Write a step's inputs, and return the function that computes its logits, [R, V], which stay valid until the next step.

        If no recording can run the step, `prepare` does nothing and returns None. `policy` is None if no sequence has a KV
        policy. If recording fails, the returned function runs a forward pass over `eager_batch()`, the same inputs elsewhere.
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
        """The attention that each block got in the last step with KV policies: [B, block table columns], both padded at the end."""
        return None


class ReplayMismatch(Exception):
    """A replay does not compute what the forward pass computes. The backend catches this error, and steps run eagerly."""


def check_replay(what: str, replayed_BV: torch.Tensor, logits_BV: torch.Tensor, *, tolerance: float = 0.0) -> None:
    """Compare a replay with a forward pass over the same inputs. Finite logits may differ by `tolerance`, a share of the largest of
    them; infinite logits must be equal, and NaN equals NaN. Raises ReplayMismatch if they differ by more."""
    most = float(logits_BV.abs().nan_to_num(posinf=0.0).max())
    differs = float((replayed_BV - logits_BV).abs().nan_to_num(0.0).max())
    if not torch.allclose(replayed_BV, logits_BV, rtol=0.0, atol=tolerance * most, equal_nan=True):
        raise ReplayMismatch(f"{what}: logits of up to {most:.4g} differ by up to {differs:.4g} from the forward pass")
    if differs:
        logger.info("The replay of %s differs by up to %.3g in logits of up to %.3g.", what, differs, most)

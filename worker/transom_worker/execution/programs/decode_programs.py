"""Records a decode step of each size when it first occurs, and replays it from then on.

A program is trusted only after a replay over another step's inputs has given the same bits as the forward pass over them. If a
model's step cannot be recorded, or fails this check, its forward pass always runs.

Legend: B sequences of a step, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from transom_core.errors import RankLost
from transom_kernels.cpu.program import Program, ReplayMemory, record_program
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.out_of_memory import is_out_of_memory
from transom_worker.execution.programs.static_inputs import StaticInputs
from transom_worker.execution.programs.static_policy_inputs import PolicyVariant, StaticPolicyInputs
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.model import Model

logger = logging.getLogger("transom.worker")


@dataclass(slots=True)
class _Recorded:
    """One size's program and the logits that it writes, [B, V]."""

    program: Program
    logits_BV: torch.Tensor
    is_checked: bool = False


class DecodePrograms:
    """The programs of one model's decode steps, by number of sequences."""

    def __init__(self, model: Model, builder: BatchBuilder, *, max_num_seqs: int, max_model_len: int) -> None:
        """`builder` makes the batches of the model's slab."""
        self._model, self._builder, self._memory = model, builder, ReplayMemory()
        self._inputs = StaticInputs(builder, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self.policy_inputs = StaticPolicyInputs(builder, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self._recorded: dict[tuple[int, PolicyVariant | None], _Recorded] = {}
        self._is_refused = False

    @property
    def num_programs(self) -> int:
        """How many sizes are recorded."""
        return len(self._recorded)

    def prepare(self, arrays: StepArrays) -> Callable[[], torch.Tensor] | None:
        """Write a decode step's inputs, and return the function that computes its logits, [B, V].

        The logits stay valid until the next step. For other steps, and where no program can be used, `prepare` returns None.
        """
        if self._is_refused or not arrays.only_decodes or not self._inputs.write(arrays):
            return None
        num_seqs = len(arrays.token_ids)
        return self._replay_of(
            (num_seqs, None), lambda: self._inputs.forward_batch(num_seqs), lambda: self._builder.batch(arrays)
        )

    def prepare_policies(
        self, arrays: StepArrays, variant: PolicyVariant, eager_batch: Callable[[], ForwardBatch]
    ) -> Callable[[], torch.Tensor] | None:
        """As `prepare`, for a step some of whose rows have KV policies. Attention mass goes to `policy_inputs.block_mass`.

        `eager_batch` makes the step's batch for a forward pass without a program.
        """
        if self._is_refused or not arrays.only_decodes or not self.policy_inputs.write(arrays):
            return None
        num_seqs = len(arrays.token_ids)
        replay = self._replay_of(
            (num_seqs, variant), lambda: self.policy_inputs.forward_batch(num_seqs, variant), eager_batch
        )

        def run() -> torch.Tensor:
            self.policy_inputs.clear_mass()
            return replay()

        return run if variant.wants_mass else replay

    def _replay_of(
        self,
        key: tuple[int, PolicyVariant | None],
        static_batch: Callable[[], ForwardBatch],
        eager_batch: Callable[[], ForwardBatch],
    ) -> Callable[[], torch.Tensor]:
        """The function that computes the logits of a step that was written into the static inputs."""
        recorded = self._recorded.get(key)
        if recorded is None:
            return partial(self._record, key, static_batch, eager_batch)
        if not recorded.is_checked:
            return partial(self._check, key, recorded, static_batch)
        return partial(_replay, recorded)

    def _record(
        self,
        key: tuple[int, PolicyVariant | None],
        static_batch: Callable[[], ForwardBatch],
        eager_batch: Callable[[], ForwardBatch],
    ) -> torch.Tensor:
        """Run the forward pass and record it; without recording where that fails."""
        batch = static_batch()
        try:
            program, logits_BV = record_program(lambda: self._model.forward(batch), self._memory)
        except Exception as error:  # the forward pass below raises it again if the recording was not its reason
            if isinstance(error, RankLost) or is_out_of_memory(error):
                raise
            self._refuse(f"{type(error).__name__}: {error}")
            return self._model.forward(eager_batch())
        self._recorded[key] = _Recorded(program, logits_BV)
        return logits_BV

    def _check(
        self, key: tuple[int, PolicyVariant | None], recorded: _Recorded, static_batch: Callable[[], ForwardBatch]
    ) -> torch.Tensor:
        """Replay a program for the first time, and compare it with the forward pass."""
        replayed_BV = _replay(recorded).clone()
        self.policy_inputs.clear_mass()
        logits_BV = self._model.forward(static_batch())
        if torch.equal(replayed_BV.nan_to_num(), logits_BV.nan_to_num()):
            recorded.is_checked = True
        else:
            differs = float((replayed_BV - logits_BV).abs().max())
            self._refuse(f"the replay for {key[0]} sequences differs by up to {differs:.3g} from the forward pass")
        return logits_BV

    def _refuse(self, reason: str) -> None:
        logger.warning("Decode steps run without recorded programs, which is slower: %s", reason)
        self._is_refused = True
        self._recorded.clear()


def _replay(recorded: _Recorded) -> torch.Tensor:
    recorded.program.replay()
    return recorded.logits_BV

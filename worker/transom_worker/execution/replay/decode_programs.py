"""Decode steps on CPUs, and those with a few tokens of prompts beside (`split_rows`), as recorded programs: each number of rows is
recorded when it first occurs, and replayed from then on.

A program is used only if a replay over another step's inputs gives the same bits as a forward pass over these inputs:

    first step of a size     runs the forward pass and records it
    second step              replays, runs the forward pass too, and compares the logits
    later steps              replay

Before a size is checked, a step's pass may run twice, and recurrent layers update their states in place. So the states are copied
before each pass that another one may repeat.

If a model's step cannot be recorded, or a comparison fails, all steps run eagerly from then on.

Legend: B rows of a step, one for each token; V vocabulary.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from transom_core.errors import RankLost
from transom_core.kv_cache.layout import ArenaLayout
from transom_kernels.cpu.program import Program, ReplayMemory, record_program
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.loss_causes import is_out_of_memory
from transom_worker.execution.replay.decode_replay import DecodeReplay, PolicyVariant, ReplayMismatch, check_replay
from transom_worker.execution.replay.fixed_inputs import FixedArrays, FixedInputs, policy_fields, step_fields
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.model import Model

logger = logging.getLogger("transom.worker")

MORE_ROWS = 32  # than sequences, of the tokens of short prompts (`split_rows`)


class Key(NamedTuple):
    """What the steps of one program have in common."""

    num_rows: int
    policy: PolicyVariant | None  # the variant of a step with KV policies
    has_adapters: bool  # whether any sequence has a LoRA adapter


@dataclass(slots=True)
class _Recorded:
    """One size's program and the logits that it writes, [B, V]."""

    program: Program
    logits_BV: torch.Tensor
    is_checked: bool = False


class DecodePrograms(DecodeReplay):
    """The programs of one model's steps, by number of rows."""

    def __init__(self, model: Model, builder: BatchBuilder, *, max_num_seqs: int, max_model_len: int) -> None:
        """`builder` makes the batches of the model's slab."""
        self._model, self._builder, self._memory = model, builder, ReplayMemory()
        groups = builder.layout.groups
        # One column more than the longest sequence fills, since a window may begin and end inside a block.
        self._num_columns = [
            1 if g.spec.is_state else g.spec.num_sink_blocks + -(-max_model_len // g.rows_per_block) + 1 for g in groups
        ]
        self._max_num_rows = max_num_seqs + MORE_ROWS
        fields = step_fields(builder, self._max_num_rows, self._num_columns)
        self._inputs = FixedInputs(builder, FixedArrays.on_cpu(fields | policy_fields(fields)))
        self._recorded: dict[Key, _Recorded] = {}
        self._is_refused = False

    @property
    def token_ids(self) -> torch.Tensor:
        """See `DecodeReplay.token_ids`."""
        return self._inputs.arrays.device["token_ids"]

    @property
    def block_mass(self) -> torch.Tensor:
        """See `DecodeReplay.block_mass`."""
        return self._inputs.block_mass

    def prepare(
        self, arrays: StepArrays, policy: PolicyVariant | None, eager_batch: Callable[[], ForwardBatch]
    ) -> Callable[[], torch.Tensor] | None:
        """Write a step's inputs, and return the function that computes its logits, [B, V], by recording, checking or replaying.

        Return None if no program can run the step; it then runs eagerly. `policy` is None if no row has a KV policy. If a recording
        fails, the function uses `eager_batch`, which makes the step's inputs outside the fixed arrays.
        """
        key = Key(len(arrays.token_ids), policy, arrays.adapter_slots is not None)
        if self._is_refused or not arrays.rows.one_each or not self._fits(arrays):
            return None
        self._inputs.write(arrays, len(arrays.token_ids))
        recorded = self._recorded.get(key)
        if recorded is None:
            run = partial(self._record, key, eager_batch)
        elif not recorded.is_checked:
            run = partial(self._check, key, recorded)
        else:
            run = partial(_replay, recorded)
        if policy is not None and policy.wants_mass:
            run = partial(self._run_with_mass, run)
        return run if arrays.only_decodes else partial(_chosen, run, arrays.logit_rows)

    def _fits(self, arrays: StepArrays) -> bool:
        """Return whether the fixed arrays have room for a step. If any row of a step has a KV policy, all must be policy rows."""
        for group, num_columns in zip(arrays.groups, self._num_columns, strict=True):
            policies = group.policies
            if policies is not None and len(policies.batch_rows) != len(arrays.token_ids):
                return False
            table = group.block_table if policies is None else policies.block_table
            if table.shape[1] > num_columns:
                return False
        return len(arrays.token_ids) <= self._max_num_rows

    def _run_with_mass(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._inputs.clear_mass()
        return run()

    def _record(self, key: Key, eager_batch: Callable[[], ForwardBatch]) -> torch.Tensor:
        """Run the forward pass and record it. If recording fails, run the forward pass without it."""
        batch = self._inputs.forward_batch(key.num_rows, key.policy, has_adapters=key.has_adapters)
        states = KeptStates(batch, self._builder.layout)
        try:
            program, logits_BV = record_program(lambda: self._model.forward(batch), self._memory)
        except Exception as error:  # if the recording was not the reason, the forward pass below raises it again
            if isinstance(error, RankLost) or is_out_of_memory(error):
                raise
            self._refuse(f"{type(error).__name__}: {error}")
            states.restore()
            return self._model.forward(eager_batch())
        self._recorded[key] = _Recorded(program, logits_BV)
        return logits_BV

    def _check(self, key: Key, recorded: _Recorded) -> torch.Tensor:
        """Replay a program for the first time, and compare it with the forward pass."""
        batch = self._inputs.forward_batch(key.num_rows, key.policy, has_adapters=key.has_adapters)
        states = KeptStates(batch, self._builder.layout)
        replayed_BV = _replay(recorded).clone()
        states.restore()
        # The replay has added this step's attention mass already; the forward pass adds it again, so the sum begins anew.
        self._inputs.clear_mass()
        logits_BV = self._model.forward(batch)
        try:
            check_replay(f"a step of {key.num_rows} rows", replayed_BV, logits_BV)
            recorded.is_checked = True
        except ReplayMismatch as error:
            self._refuse(str(error))
        return logits_BV

    def _refuse(self, reason: str) -> None:
        logger.warning("Decode steps run without recorded programs, which is slower: %s", reason)
        self._is_refused = True
        self._recorded.clear()


class KeptStates:
    """Copies of the states that a batch writes, from before its pass."""

    def __init__(self, batch: ForwardBatch, layout: ArenaLayout) -> None:
        self._kept = [
            (tensor, blocks, tensor[blocks])
            for cache, index in zip(batch.caches, batch.group_of_layer, strict=True)
            if layout.groups[index].spec.is_state
            for tensor in (cache.k, cache.v)
            for blocks in [batch.groups[index].block_table[:, 0].long()]
        ]

    def restore(self) -> None:
        """Write the copies back."""
        for tensor, blocks, copies in self._kept:
            tensor[blocks] = copies


def _chosen(run: Callable[[], torch.Tensor], logit_rows: NDArray[np.int64]) -> torch.Tensor:
    """Return the logits of some rows only, [R, V]. A step that could not be recorded has computed no others."""
    logits = run()
    return logits if len(logits) == len(logit_rows) else logits[torch.from_numpy(logit_rows)]


def _replay(recorded: _Recorded) -> torch.Tensor:
    recorded.program.replay()
    return recorded.logits_BV

"""Holds the inputs of decode steps in which at least one row has a KV policy, at fixed addresses for recorded programs on CPUs.

(With CUDA graphs such steps run eagerly.) All rows of such a step are computed as policy rows, with compact block tables
(`batch.compact_tables`). The step uses the arrays of `fixed_inputs` and adds those of the policies.

Legend: B sequences of a step, each with one new token; N table columns.
"""

from __future__ import annotations

import dataclasses

import torch

from transom_kernels.policy_attention import PolicyBatch
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.replay.decode_replay import PolicyVariant
from transom_worker.execution.replay.fixed_inputs import FLOAT, INT, LONG, FixedArrays, FixedInputs
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.policy_rows import MassMeter, MixedBatch
from transom_worker.uploads import Field, Fields


def policy_fields(steps: Fields) -> dict[str, Field]:
    """Return the shapes and dtypes of the policies' arrays. `steps` has those of the decode step's other arrays.

    The name of a group's array ends with the group's index: `block_table 0`. `mass` has one sum for each entry of the block table.
    """
    (num_seqs,), _ = steps["token_ids"]
    fields: dict[str, Field] = {"sink_positions": ((num_seqs,), LONG)}
    for name in [name for name in steps if name.startswith("block_table")]:
        group = name.split()[1]
        fields[f"key_blocks {group}"] = (steps[name][0], INT)
        fields[f"mass {group}"] = (steps[name][0], FLOAT)
        for row in ("num_columns", "window", "sinks"):
            fields[f"{row} {group}"] = ((num_seqs,), INT)
    return fields


class PolicyInputs:
    """Writes decode steps of policy rows into fixed arrays, and gives the model views of them.

        inputs.write(step)                                 # into the fixed arrays
        inputs.clear_mass()                                # if the step adds up attention mass
        batch = inputs.forward_batch(num_seqs, variant)    # views of the fixed arrays, to record or to check a program
        inputs.block_mass                                  # after the model has run

    `arrays` has at least the arrays of `policy_fields`.
    """

    def __init__(self, builder: BatchBuilder, arrays: FixedArrays) -> None:
        self._builder, self._arrays = builder, arrays
        self._inputs = FixedInputs(builder, arrays)

    @property
    def block_mass(self) -> torch.Tensor:
        """The attention mass that layers of group 0 have added up since `clear_mass`, [at least B, at least N]."""
        return self._arrays.device["mass 0"]

    def write(self, arrays: StepArrays) -> None:
        """Write the inputs of a step into the arrays. All rows of the step must be policy rows."""
        num_seqs, to = len(arrays.token_ids), self._arrays.host
        self._inputs.write_tokens(arrays, num_seqs)
        to["sink_positions"][:num_seqs] = self._builder.sink_positions(arrays)
        for index, group in enumerate(arrays.groups):
            policies = group.policies
            assert policies is not None
            self._inputs.write_table(f"block_table {index}", policies.block_table)
            self._inputs.write_table(f"key_blocks {index}", policies.key_blocks)
            to[f"num_columns {index}"][:num_seqs] = policies.num_columns
            to[f"window {index}"][:num_seqs] = policies.window
            to[f"sinks {index}"][:num_seqs] = policies.sinks

    def clear_mass(self) -> None:
        """Set the attention mass to zero, so that the next forward pass begins a new sum."""
        for index in range(len(self._builder.layout.groups)):
            self._arrays.host[f"mass {index}"].fill(0.0)

    def forward_batch(self, num_seqs: int, variant: PolicyVariant) -> ForwardBatch:
        """Return views of the inputs of the first `num_seqs` sequences, as `FixedInputs.forward_batch` does."""
        batch = self._inputs.forward_batch(num_seqs)
        batch.groups = tuple(self._mixed_batch(index, num_seqs, variant) for index in range(len(batch.groups)))
        if variant.passes_trained_len:
            batch.sink_positions = self._arrays.device["sink_positions"][:num_seqs]
        return batch

    def _mixed_batch(self, index: int, num_seqs: int, variant: PolicyVariant) -> MixedBatch:
        """Return the attention metadata of group `index`. All rows are policy rows, so the fields about other rows are empty.

        Only `slots` is not empty: it has the slots of all rows.
        """
        others, on = self._inputs.paged_batch(index, 0), self._arrays.device
        fields = {field.name: getattr(others, field.name) for field in dataclasses.fields(others)}
        return MixedBatch(
            **(fields | {"slots": on[f"slots {index}"][:num_seqs]}),
            policies=self._policy_batch(index, num_seqs),
            policy_rows=None,
            other_rows=None,
            meter=MassMeter(block_mass=on[f"mass {index}"][:num_seqs]) if variant.wants_mass else None,
        )

    def _policy_batch(self, index: int, num_seqs: int) -> PolicyBatch:
        on = self._arrays.device
        offsets = on["query_offset"][: num_seqs + 1]
        return PolicyBatch(
            block_size=self._builder.layout.groups[index].rows_per_block,
            block_table=on[f"block_table {index}"][:num_seqs],
            key_blocks=on[f"key_blocks {index}"][:num_seqs],
            num_columns=on[f"num_columns {index}"][:num_seqs],
            window=on[f"window {index}"][:num_seqs],
            sinks=on[f"sinks {index}"][:num_seqs],
            start=on["start"][:num_seqs],
            query_offset=offsets,
            count_host=[],
        )

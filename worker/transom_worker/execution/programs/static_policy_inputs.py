"""The input arrays of recorded decode steps some of whose rows have KV policies; all rows are then computed as policy rows.

Legend: B sequences of a step, N table columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from transom_kernels.policy_attention import PolicyBatch
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.policy_arrays import PolicyArrays
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.policy_rows import MassMeter, MixedBatch


@dataclass(frozen=True, slots=True)
class PolicyVariant:
    """What a program of policy rows does besides."""

    wants_mass: bool  # it adds up attention mass by block
    passes_trained_len: bool  # it rotates queries for sink tokens apart


class StaticPolicyInputs:
    """Arrays for up to `max_num_seqs` sequences, each with one new token."""

    def __init__(self, builder: BatchBuilder, *, max_num_seqs: int, max_model_len: int) -> None:
        """Allocate the arrays; memory is taken where a step writes first."""
        self._builder, self.max_num_seqs = builder, max_num_seqs
        self._token_ids, self._positions, self._sink_positions = (np.zeros(max_num_seqs, np.int64) for _ in range(3))
        self._rows = np.arange(max_num_seqs, dtype=np.int64)
        self._offsets = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._groups = [
            _GroupInputs(max_num_seqs, -(-max_model_len // group.rows_per_block) + 1, group.rows_per_block)
            for group in builder.layout.groups
        ]

    @property
    def block_mass(self) -> torch.Tensor:
        """The attention mass that the last step has added up, [max_num_seqs, N]."""
        return torch.from_numpy(self._groups[0].mass)

    def write(self, arrays: StepArrays) -> bool:
        """Write a step; return False, and write nothing, where it does not fit."""
        num_seqs = len(arrays.token_ids)
        policies = [group.policies for group in arrays.groups]
        if num_seqs > self.max_num_seqs or any(
            part is None or len(part.batch_rows) != num_seqs or part.block_table.shape[1] > own.block_table.shape[1]
            for part, own in zip(policies, self._groups, strict=True)
        ):
            return False
        self._token_ids[:num_seqs] = arrays.token_ids
        self._positions[:num_seqs] = arrays.rows.positions
        self._sink_positions[:num_seqs] = self._builder.sink_positions(arrays)
        for group, part, own in zip(arrays.groups, policies, self._groups, strict=True):
            assert part is not None
            own.slots[:num_seqs] = group.slots
            own.write(part)
        return True

    def clear_mass(self) -> None:
        """Begin a new sum of attention mass."""
        for group in self._groups:
            group.mass.fill(0.0)

    def forward_batch(self, num_seqs: int, variant: PolicyVariant) -> ForwardBatch:
        """Return the first `num_seqs` sequences' inputs. They have none of the lists that operators read in Python."""
        return ForwardBatch(
            token_ids=torch.from_numpy(self._token_ids[:num_seqs]),
            positions=torch.from_numpy(self._positions[:num_seqs]),
            groups=tuple(self._mixed_batch(own, num_seqs, variant) for own in self._groups),
            group_of_layer=self._builder.group_of_layer,
            caches=self._builder.caches,
            logit_rows=torch.from_numpy(self._rows[:num_seqs]),
            sink_positions=torch.from_numpy(self._sink_positions[:num_seqs]) if variant.passes_trained_len else None,
        )

    def _mixed_batch(self, own: _GroupInputs, num_seqs: int, variant: PolicyVariant) -> MixedBatch:
        none = torch.empty(0, dtype=torch.int32)
        offsets = torch.from_numpy(self._offsets[: num_seqs + 1])
        return MixedBatch(
            block_size=own.block_size,
            num_sink_blocks=0,
            block_table=none.view(0, 0),
            first_block=none,
            attend_from=none,
            slots=torch.from_numpy(own.slots[:num_seqs]),
            query_offset=offsets[:1],
            start=none,
            block_table_host=[],
            first_block_host=[],
            attend_from_host=[],
            start_host=[],
            count_host=[],
            policies=own.policy_batch(offsets, num_seqs),
            policy_rows=None,
            other_rows=None,
            meter=MassMeter(block_mass=torch.from_numpy(own.mass[:num_seqs])) if variant.wants_mass else None,
        )


class _GroupInputs:
    """One group's arrays. Table columns behind a sequence's own are not read."""

    def __init__(self, max_num_seqs: int, num_columns: int, block_size: int) -> None:
        self.block_size = block_size
        self.block_table, self.key_blocks = (np.zeros((max_num_seqs, num_columns), np.int32) for _ in range(2))
        self.num_columns, self.window, self.sinks, self.start = (np.zeros(max_num_seqs, np.int32) for _ in range(4))
        self.slots = np.zeros(max_num_seqs, np.int64)
        self.mass = np.zeros((max_num_seqs, num_columns), np.float32)

    def write(self, arrays: PolicyArrays) -> None:
        """Write a step's rows."""
        num_seqs, num_columns = arrays.block_table.shape
        self.block_table[:num_seqs, :num_columns] = arrays.block_table
        self.key_blocks[:num_seqs, :num_columns] = arrays.key_blocks
        self.num_columns[:num_seqs] = arrays.num_columns
        self.window[:num_seqs] = arrays.window
        self.sinks[:num_seqs] = arrays.sinks
        self.start[:num_seqs] = arrays.start

    def policy_batch(self, offsets: torch.Tensor, num_seqs: int) -> PolicyBatch:
        """Return the arrays of the first `num_seqs` sequences as tensors."""
        return PolicyBatch(
            block_size=self.block_size,
            block_table=torch.from_numpy(self.block_table[:num_seqs]),
            key_blocks=torch.from_numpy(self.key_blocks[:num_seqs]),
            num_columns=torch.from_numpy(self.num_columns[:num_seqs]),
            window=torch.from_numpy(self.window[:num_seqs]),
            sinks=torch.from_numpy(self.sinks[:num_seqs]),
            start=torch.from_numpy(self.start[:num_seqs]),
            query_offset=offsets,
            row_sequence=offsets[:num_seqs],
            count_host=[],
        )

"""The input arrays of recorded decode steps, at fixed addresses, which the steps of all sizes share.

Legend: B sequences of a step, N table columns.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.models.layers.forward_batch import ForwardBatch


class StaticInputs:
    """Arrays for up to `max_num_seqs` sequences, each with one new token."""

    def __init__(self, builder: BatchBuilder, *, max_num_seqs: int, max_model_len: int) -> None:
        """Allocate the arrays; memory is taken where a step writes first."""
        self._builder, self.max_num_seqs = builder, max_num_seqs
        self._token_ids = _longs(max_num_seqs)
        self._positions = _longs(max_num_seqs)
        self._start = _ints(max_num_seqs)
        self._rows = np.arange(max_num_seqs, dtype=np.int64)
        self._offsets = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._groups = [
            _GroupInputs(max_num_seqs, group.spec.num_sink_blocks + -(-max_model_len // group.rows_per_block) + 1)
            for group in builder.layout.groups
        ]

    def write(self, arrays: StepArrays) -> bool:
        """Write a step; return False, and write nothing, where it does not fit."""
        num_seqs = len(arrays.token_ids)
        if num_seqs > self.max_num_seqs:
            return False
        if any(
            group.block_table.shape[1] > own.block_table.shape[1]
            for group, own in zip(arrays.groups, self._groups, strict=True)
        ):
            return False
        self._token_ids[:num_seqs] = arrays.token_ids
        self._positions[:num_seqs] = arrays.rows.positions
        self._start[:num_seqs] = arrays.rows.start
        for group, own in zip(arrays.groups, self._groups, strict=True):
            own.block_table[:num_seqs, : group.block_table.shape[1]] = group.block_table
            own.first_block[:num_seqs] = group.first_block
            own.attend_from[:num_seqs] = group.attend_from_host
            own.slots[:num_seqs] = group.slots
        return True

    def forward_batch(self, num_seqs: int) -> ForwardBatch:
        """Return the first `num_seqs` sequences' inputs. They have none of the lists that operators read in Python."""
        return ForwardBatch(
            token_ids=torch.from_numpy(self._token_ids[:num_seqs]),
            positions=torch.from_numpy(self._positions[:num_seqs]),
            groups=tuple(self._paged_batch(index, num_seqs) for index in range(len(self._groups))),
            group_of_layer=self._builder.group_of_layer,
            caches=self._builder.caches,
            logit_rows=torch.from_numpy(self._rows[:num_seqs]),
        )

    def _paged_batch(self, index: int, num_seqs: int) -> PagedBatch:
        group, own = self._builder.layout.groups[index], self._groups[index]
        return PagedBatch(
            block_size=group.rows_per_block,
            num_sink_blocks=group.spec.num_sink_blocks,
            block_table=torch.from_numpy(own.block_table[:num_seqs]),
            first_block=torch.from_numpy(own.first_block[:num_seqs]),
            attend_from=torch.from_numpy(own.attend_from[:num_seqs]),
            slots=torch.from_numpy(own.slots[:num_seqs]),
            query_offset=torch.from_numpy(self._offsets[: num_seqs + 1]),
            start=torch.from_numpy(self._start[:num_seqs]),
            block_table_host=[],
            first_block_host=[],
            attend_from_host=[],
            start_host=[],
            count_host=[],
        )


class _GroupInputs:
    """One group's arrays. Table columns behind a step's own are not read."""

    def __init__(self, max_num_seqs: int, num_columns: int) -> None:
        self.block_table = np.zeros((max_num_seqs, num_columns), dtype=np.int32)
        self.first_block = _ints(max_num_seqs)
        self.attend_from = _ints(max_num_seqs)
        self.slots = _longs(max_num_seqs)


def _longs(number: int) -> NDArray[np.int64]:
    return np.zeros(number, dtype=np.int64)


def _ints(number: int) -> NDArray[np.int32]:
    return np.zeros(number, dtype=np.int32)

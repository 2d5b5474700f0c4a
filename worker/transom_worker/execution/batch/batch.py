"""Turns a step's numpy arrays into the tensors of a forward pass. On CPUs a tensor shares the array's memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from transom_core.kv_cache.layout import ArenaLayout
from transom_kernels.launch import uses_cpu_kernels, uses_triton
from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.policy_attention import PolicyBatch
from transom_worker.execution.batch.policy_arrays import PolicyArrays
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.batch.step_arrays import GroupArrays, RowRanges, StepArrays, row_ranges, step_arrays
from transom_worker.execution.tiers.device_slab import compressed_caches, group_of_layer, layer_caches
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.policy_rows import MassMeter, MixedBatch
from transom_worker.scheduling.step import StepPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRows:
    """One group's inputs of rows that attend to everything, to measure what their KV policies drop."""

    slots: NDArray[np.int64]
    everything: PolicyArrays  # what they attend to
    masked: PolicyArrays  # what their policies would let them attend to


class BatchBuilder:
    """Builds the `ForwardBatch` of each step over one slab, the memory of a rank's KV pool."""

    def __init__(
        self, layout: ArenaLayout, slab: torch.Tensor, device: torch.device, *, trained_len: int | None = None
    ) -> None:
        """`trained_len` is the longest context that the model was trained with; rows without a KV policy never exceed it."""
        self.layout, self.device = layout, device
        self._trained_len = trained_len
        # Compiled CPU kernels give a row without a policy the same bits as a policy row, and are recorded as one program.
        self._joins_decodes = uses_cpu_kernels(slab)
        self.caches, self._compressed = layer_caches(layout, slab), compressed_caches(layout, slab)
        self.group_of_layer = group_of_layer(layout)
        # Triton's kernels read block tables on the device. Other operators need them as lists, which take milliseconds to make.
        self._kernels_read_tables = uses_triton(slab)

    def build(self, plan: StepPlan, store: SequenceStore) -> ForwardBatch:
        """Return the forward pass's inputs for a plan; see `arrays`."""
        return self.batch(self.arrays(plan, store))

    def arrays(self, plan: StepPlan, store: SequenceStore) -> StepArrays:
        """Return the numbers that a plan asks for. The sequences' new tokens and block tables must be up to date.

        Raises:
            ValueError: a token that is to be written has no block.
        """
        return step_arrays(plan, store, self.layout, joins_decodes=self._joins_decodes)

    def batch(self, arrays: StepArrays) -> ForwardBatch:
        """Return these arrays as tensors on the device, with the caches of this slab."""
        offsets_and_starts = self._offsets_and_starts(arrays.rows)
        needs_sink_positions = arrays.has_policies and self.passes_trained_len(arrays)
        return ForwardBatch(
            token_ids=self._tensor(arrays.token_ids),
            positions=self._tensor(arrays.rows.positions),
            groups=tuple(
                self._paged_batch(
                    group, offsets_and_starts if group.rows is arrays.rows else self._offsets_and_starts(group.rows)
                )
                for group in arrays.groups
            ),
            group_of_layer=self.group_of_layer,
            caches=self.caches,
            compressed=self._compressed,
            logit_rows=self._tensor(arrays.logit_rows),
            sink_positions=self._tensor(self.sink_positions(arrays)) if needs_sink_positions else None,
        )

    def sink_positions(self, arrays: StepArrays) -> NDArray[np.int64]:
        """Return the positions of queries that meet sink tokens: none is beyond the length that the model was trained with."""
        positions = arrays.rows.positions
        return positions if self._trained_len is None else np.minimum(positions, self._trained_len - 1)

    def passes_trained_len(self, arrays: StepArrays) -> bool:
        """Whether a step has a token beyond the length that the model was trained with."""
        return self._trained_len is not None and int(arrays.rows.positions.max(initial=0)) >= self._trained_len

    def _paged_batch(self, group: GroupArrays, offsets_and_starts: tuple[torch.Tensor, torch.Tensor]) -> PagedBatch:
        paged = PagedBatch(
            block_size=group.block_size,
            num_sink_blocks=group.num_sink_blocks,
            block_table=self._tensor(group.block_table),
            first_block=self._tensor(group.first_block.astype(np.int32)),
            attend_from=self._tensor(np.array(group.attend_from_host, dtype=np.int32)),
            slots=self._tensor(group.slots),
            query_offset=offsets_and_starts[0],
            start=offsets_and_starts[1],
            block_table_host=[] if self._kernels_read_tables else group.block_table.tolist(),
            first_block_host=group.first_block_host,
            attend_from_host=group.attend_from_host,
            start_host=group.start_host,
            count_host=group.count_host,
        )
        return paged if group.policies is None else self._mixed_batch(paged, group.policies)

    def _mixed_batch(self, others: PagedBatch, arrays: PolicyArrays) -> MixedBatch:
        fields = {field.name: getattr(others, field.name) for field in dataclasses.fields(others)}
        other_rows = np.setdiff1d(np.arange(len(others.slots)), arrays.token_rows)
        return MixedBatch(
            **fields,
            policies=self.policy_batch(arrays),
            policy_rows=self._tensor(arrays.token_rows) if len(other_rows) else None,
            other_rows=self._tensor(other_rows) if len(other_rows) else None,
        )

    def measured_batch(
        self, arrays: StepArrays, tokens: list[int], groups: list[MeasuredRows], dropped: torch.Tensor
    ) -> ForwardBatch:
        """Return a batch of some of a step's query tokens, which attend to everything.

        Layers add to `dropped` [tokens] how much attention goes to what the tokens' policies mask.
        """
        positions = arrays.rows.positions[tokens]
        count = len(tokens)
        whole = StepArrays(
            token_ids=arrays.token_ids[tokens],
            rows=_rows_of(positions),
            logit_rows=np.arange(count),
            groups=tuple(
                GroupArrays(
                    block_size=rows.everything.block_size,
                    num_sink_blocks=0,
                    block_table=np.empty((0, 1), dtype=np.int32),
                    first_block=np.empty(0, dtype=np.int64),
                    attend_from_host=[],
                    slots=rows.slots,
                    rows=_rows_of(positions[:0]),
                    policies=rows.everything,
                )
                for rows in groups
            ),
            has_policies=True,
        )
        batch = self.batch(whole)
        for group, rows in zip(batch.groups, groups, strict=True):
            assert isinstance(group, MixedBatch)
            group.meter = MassMeter(dropped=dropped, masked=self.policy_batch(rows.masked))
        return batch

    def policy_batch(self, arrays: PolicyArrays) -> PolicyBatch:
        """Return the arrays of policy rows as tensors on the device."""
        return PolicyBatch(
            block_size=arrays.block_size,
            block_table=self._tensor(arrays.block_table),
            key_blocks=self._tensor(arrays.key_blocks),
            num_columns=self._tensor(arrays.num_columns),
            window=self._tensor(arrays.window),
            sinks=self._tensor(arrays.sinks),
            start=self._tensor(arrays.start),
            query_offset=self._tensor(arrays.query_offset),
            count_host=arrays.count_host,
        )

    def _offsets_and_starts(self, rows: RowRanges) -> tuple[torch.Tensor, torch.Tensor]:
        """`query_offset` and `start` of paged batches over these rows."""
        return self._tensor(rows.offset.astype(np.int32)), self._tensor(rows.start.astype(np.int32))

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)


def _rows_of(positions: NDArray[np.int64]) -> RowRanges:
    """The ranges of single tokens at these positions."""
    return row_ranges(positions.tolist(), [1] * len(positions))

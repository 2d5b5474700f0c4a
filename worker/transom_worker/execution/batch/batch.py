"""Turns a step's numpy arrays into the tensors of a forward pass. On CPUs a tensor shares the array's memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.launch import uses_triton
from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.batch.slab import compressed_caches, group_of_layer, layer_caches
from transom_worker.execution.batch.step_arrays import GroupArrays, RowRanges, StepArrays, step_arrays
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.layers.forward_batch import ForwardBatch
from transom_worker.scheduling.step import StepPlan


class BatchBuilder:
    """Builds the `ForwardBatch` of each step over one slab, the memory of a rank's KV pool."""

    def __init__(self, layout: ArenaLayout, slab: torch.Tensor, device: torch.device) -> None:
        self.layout, self.device = layout, device
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
        return step_arrays(plan, store, self.layout)

    def batch(self, arrays: StepArrays) -> ForwardBatch:
        """Return these arrays as tensors on the device, with the caches of this slab."""
        offsets_and_starts = self._offsets_and_starts(arrays.rows)
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
        )

    def _paged_batch(self, group: GroupArrays, offsets_and_starts: tuple[torch.Tensor, torch.Tensor]) -> PagedBatch:
        return PagedBatch(
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

    def _offsets_and_starts(self, rows: RowRanges) -> tuple[torch.Tensor, torch.Tensor]:
        """`query_offset` and `start` of paged batches over these rows."""
        return self._tensor(rows.offset.astype(np.int32)), self._tensor(rows.start.astype(np.int32))

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

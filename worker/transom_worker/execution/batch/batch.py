"""A step's numbers to the forward pass's tensors: each array becomes a tensor once; on CPUs a tensor shares numpy's memory."""

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
    """Builds ForwardBatches over one slab."""

    def __init__(self, layout: ArenaLayout, slab: torch.Tensor, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.caches, self._compressed = layer_caches(layout, slab), compressed_caches(layout, slab)
        self.group_of_layer = group_of_layer(layout)
        # Triton's kernels do: a list of a long batch's tables takes milliseconds
        self._finds_blocks_itself = uses_triton(slab)

    def build(self, plan: StepPlan, store: SequenceStore) -> ForwardBatch:
        """The forward pass that the plan asks for; see `arrays`."""
        return self.batch(self.arrays(plan, store))

    def arrays(self, plan: StepPlan, store: SequenceStore) -> StepArrays:
        """The numbers that the plan asks for; deltas and new tokens are applied already.

        Raises:
            ValueError: a token that is to be written has no block.
        """
        return step_arrays(plan, store, self.layout)

    def batch(self, arrays: StepArrays) -> ForwardBatch:
        """The same as tensors, over this slab."""
        bounds = self._bounds(arrays.spans)
        return ForwardBatch(
            token_ids=self._tensor(arrays.token_ids),
            positions=self._tensor(arrays.spans.positions),
            groups=tuple(
                self._paged_batch(group, bounds if group.spans is arrays.spans else self._bounds(group.spans))
                for group in arrays.groups
            ),
            group_of_layer=self.group_of_layer,
            caches=self.caches,
            compressed=self._compressed,
            logit_rows=self._tensor(arrays.logit_rows),
        )

    def _paged_batch(self, group: GroupArrays, bounds: tuple[torch.Tensor, torch.Tensor]) -> PagedBatch:
        return PagedBatch(
            block_size=group.block_size,
            num_sink_blocks=group.num_sink_blocks,
            block_table=self._tensor(group.block_table),
            first_block=self._tensor(group.first_block.astype(np.int32)),
            attend_from=self._tensor(np.array(group.attend_from_host, dtype=np.int32)),
            slots=self._tensor(group.slots),
            query_offset=bounds[0],
            start=bounds[1],
            block_table_host=[] if self._finds_blocks_itself else group.block_table.tolist(),
            first_block_host=group.first_block_host,
            attend_from_host=group.attend_from_host,
            start_host=group.start_host,
            count_host=group.count_host,
        )

    def _bounds(self, spans: RowRanges) -> tuple[torch.Tensor, torch.Tensor]:
        """`query_offset` and `start` of paged batches over these rows."""
        return self._tensor(spans.offset.astype(np.int32)), self._tensor(spans.start.astype(np.int32))

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

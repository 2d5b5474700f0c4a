"""The inputs of one captured size: a decode step in fixed arrays, and the work items of its attention kernels.

A step with fewer sequences than the size is padded (`fixed_inputs`). Each padding sequence has one work item that reads no key and
writes zeros. Kernel programs after the last work item have no tokens, so they do nothing.

Legend: B sequences of the size, W work items and J combined sequences of an attention layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from transom_kernels.paged_attention.triton.launches import AttentionLaunch, LaunchKey, set_launches
from transom_kernels.paged_attention.triton.work_items import ITEM_FIELDS, NO_PARTIAL, Work, WorkPlan, plan_work
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.replay.decode_sizes import DecodeSize, DecodeSizes, StepSize
from transom_worker.execution.replay.fixed_inputs import INT, FixedArrays, FixedInputs, step_fields
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.uploads import Field, packed_bytes

BEFORE_ALL = -1  # the position of a padding sequence's query: before every key, so that it reads none

GroupLaunchKey = tuple[int, LaunchKey]  # index of a group, and the key of one kind of its attention layers


def plan_work_by_key(arrays: StepArrays, launch_keys: Sequence[GroupLaunchKey]) -> list[WorkPlan]:
    """Return a decode step's work items for each launch key."""
    return [plan_work(arrays.groups[index], key.rule, key.tilings[0]) for index, key in launch_keys]


def size_of(arrays: StepArrays, work_plans: Sequence[WorkPlan]) -> StepSize:
    """Return the sequences, work items and table columns that a step needs."""
    return StepSize(
        num_seqs=len(arrays.token_ids),
        num_items=max((len(work.items) for work in work_plans), default=0),
        has_combine_items=any(len(work.combine_items) for work in work_plans),
        num_columns=tuple(group.block_table.shape[1] for group in arrays.groups),
    )


class GraphInputs:
    """One size's arrays, in a host buffer and a device buffer that all sizes share."""

    def __init__(
        self,
        size: DecodeSize,
        sizes: DecodeSizes,
        launch_keys: Sequence[GroupLaunchKey],
        builder: BatchBuilder,
        *,
        host: torch.Tensor,
        device: torch.Tensor,
    ) -> None:
        """Lay the arrays out in the buffers, which have at least `buffer_bytes(size)` bytes each."""
        self._launch_keys, self._num_seqs = tuple(launch_keys), size.num_seqs
        self.arrays = FixedArrays.packed(_fields(size, sizes, launch_keys, builder), host, device)
        self._inputs = FixedInputs(builder, self.arrays)
        self.num_bytes = buffer_bytes(size, sizes, launch_keys, builder)

    def write(self, arrays: StepArrays, work_plans: Sequence[WorkPlan]) -> None:
        """Write a step that fits into the size to the host buffer."""
        self._inputs.write(arrays, self._num_seqs)
        to = self.arrays.host
        for index, work in enumerate(work_plans):
            padded = self._with_padding(work, len(arrays.token_ids))
            padded.write(to[f"items {index}"], to[f"combine_items {index}"])  # type: ignore[arg-type]

    def forward_batch(self) -> ForwardBatch:
        """Return a new `ForwardBatch` over the device buffer, with the launches of its attention layers."""
        batch, on = self._inputs.forward_batch(self._num_seqs), self.arrays.device
        for index, (group, key) in enumerate(self._launch_keys):
            items, combine_items = on[f"items {index}"], on[f"combine_items {index}"]
            work = Work(items=items, combine_items=combine_items, num_partials=len(items) if len(combine_items) else 0)
            set_launches(batch.groups[group], key, [AttentionLaunch(work, key.tilings[0].tile_tokens)])
        return batch

    def _with_padding(self, work: WorkPlan, num_real: int) -> WorkPlan:
        """Return the step's work items, and for each padding sequence one work item that sees no key."""
        padding = np.zeros((self._num_seqs - num_real, ITEM_FIELDS), dtype=np.int32)
        row, tokens, position, sequence, partial = 0, 1, 2, 3, 8  # fields of a work item, see `work_items`
        padding[:, row] = padding[:, sequence] = np.arange(num_real, self._num_seqs)
        padding[:, tokens], padding[:, position], padding[:, partial] = 1, BEFORE_ALL, NO_PARTIAL
        return replace(work, items=np.concatenate([work.items, padding]))


def buffer_bytes(
    size: DecodeSize, sizes: DecodeSizes, launch_keys: Sequence[GroupLaunchKey], builder: BatchBuilder
) -> int:
    """Return the bytes of a size's arrays."""
    return packed_bytes(_fields(size, sizes, launch_keys, builder))


def _fields(
    size: DecodeSize, sizes: DecodeSizes, launch_keys: Sequence[GroupLaunchKey], builder: BatchBuilder
) -> dict[str, Field]:
    columns = [sizes.num_columns(size, group) for group in range(len(builder.layout.groups))]
    fields = step_fields(builder, size.num_seqs, columns)
    for index in range(len(launch_keys)):
        fields[f"items {index}"] = ((sizes.num_items(size), ITEM_FIELDS), INT)
        fields[f"combine_items {index}"] = ((sizes.num_combine_items(size), 4), INT)
    return fields

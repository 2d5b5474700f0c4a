"""The inputs of one captured size: a step in fixed arrays, and the work items of its attention kernels.

A step with fewer sequences or tokens than the size is padded (`fixed_inputs`). A decode size has one launch for each launch key,
and each padding sequence one work item in it that reads no key and writes zeros. A mixed size has one launch for each launch key
and tiling, and the padding tokens are such work items of the last tiling, a whole tile each: no kernel reads rows that none wrote.
Kernel programs after the last work item have no tokens, so they do nothing.

Legend: B sequences of the size, W work items and J combined sequences of an attention layer.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from transom_kernels.paged_attention.triton.launches import AttentionLaunch, LaunchKey, set_launches
from transom_kernels.paged_attention.triton.work_items import ITEM_FIELDS, NO_PARTIAL, Tiling, Work, WorkPlan, plan_work
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.replay.decode_sizes import AskedLaunch, DecodeSize, DecodeSizes, StepSize
from transom_worker.execution.replay.fixed_inputs import INT, FixedArrays, FixedInputs, step_fields
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.uploads import Field, packed_bytes

BEFORE_ALL = -1  # the position of a padding query, whose work item reads no key

GroupLaunchKey = tuple[int, LaunchKey]  # index of a group, and the key of one kind of its attention layers


def plan_work_by_key(
    arrays: StepArrays, launch_keys: Sequence[GroupLaunchKey], *, is_mixed: bool = False
) -> list[WorkPlan]:
    """Return a step's work items for each launch key, and for each tiling of it if the step is mixed."""
    return [
        plan_work(arrays.groups[index], key.rule, tiling) for index, key, tiling in _launches(launch_keys, is_mixed)
    ]


def size_of(
    arrays: StepArrays, work_plans: Sequence[WorkPlan], mixed_keys: Sequence[GroupLaunchKey] | None = None
) -> StepSize:
    """Return the sequences, work items and table columns that a step needs; `mixed_keys` are the launch keys, for a mixed step.
    There are none if all layers read the rows that indexers select."""
    return StepSize(
        num_seqs=len(arrays.rows.start_host),
        num_columns=tuple(group.block_table.shape[1] for group in arrays.groups),
        mixed_tokens=0 if mixed_keys is None else len(arrays.token_ids),
        works=() if mixed_keys is None else tuple(zip(_launches(mixed_keys, True), work_plans, strict=True)),
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
        self._launches = _launches(launch_keys, size.mixed_tokens > 0)
        self.size, self._builder = size, builder
        self._rooms = [sizes.room(size, launch) for launch in self._launches]
        self.arrays = FixedArrays.packed(_fields(size, sizes, launch_keys, builder), host, device)
        self._inputs = FixedInputs(builder, self.arrays)
        self.num_bytes = buffer_bytes(size, sizes, launch_keys, builder)

    def write(self, arrays: StepArrays, work_plans: Sequence[WorkPlan]) -> None:
        """Write a step that fits into the size to the host buffer."""
        self._inputs.write(arrays, self.size.num_seqs, self.size.mixed_tokens)
        to = self.arrays.host
        for index, work in enumerate(work_plans):
            padded = self._with_padding(work, self._launches[index][2], len(arrays.token_ids))
            padded.write(to[f"items {index}"], to[f"combine_items {index}"])  # type: ignore[arg-type]

    def forward_batch(self) -> ForwardBatch:
        """Return a new `ForwardBatch` over the device buffer, with the launches of its attention layers."""
        on = self.arrays.device
        batch = self._builder.batch_of(on)
        launches: dict[GroupLaunchKey, list[AttentionLaunch]] = {}
        for index, (group, key, tiling) in enumerate(self._launches):
            items, combine_items = on[f"items {index}"], on[f"combine_items {index}"]
            work = Work(items=items, combine_items=combine_items, num_partials=self._rooms[index].num_partials)
            launches.setdefault((group, key), []).append(AttentionLaunch(work, tiling.tile_tokens))
        for (group, key), of_key in launches.items():
            set_launches(batch.groups[group], key, of_key)
        return batch

    def _with_padding(self, work: WorkPlan, tiling: Tiling, num_real: int) -> WorkPlan:
        """Return the step's work items, and such as see no key: in a decode size one for each padding sequence, in a mixed size
        those of the padding tokens, in the launch for prompts."""
        size = self.size
        if size.mixed_tokens and not tiling.is_for_prompts:
            return work
        rows = np.arange(num_real, size.num_tokens, tiling.tile_tokens)
        if not len(rows):
            return work
        padding = np.zeros((len(rows), ITEM_FIELDS), dtype=np.int32)
        row, tokens, position, sequence, partial = 0, 1, 2, 3, 8  # fields of a work item, see `work_items`
        padding[:, row], padding[:, sequence] = rows, 0 if size.mixed_tokens else rows
        padding[:, tokens] = np.minimum(tiling.tile_tokens, size.num_tokens - rows)
        padding[:, position], padding[:, partial] = BEFORE_ALL, NO_PARTIAL
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
    fields = step_fields(builder, size.num_seqs, columns, num_tokens=size.num_tokens)
    for index, launch in enumerate(_launches(launch_keys, size.mixed_tokens > 0)):
        room = sizes.room(size, launch)
        fields[f"items {index}"] = ((room.num_items, ITEM_FIELDS), INT)
        fields[f"combine_items {index}"] = ((room.num_combine_items, 4), INT)
    return fields


def _launches(launch_keys: Sequence[GroupLaunchKey], is_mixed: bool) -> list[AskedLaunch]:
    """Return group, launch key and tiling of each attention launch of a decode step or a mixed step."""
    if not is_mixed:
        return [(group, key, key.tilings[0]) for group, key in launch_keys]
    return [(group, key, tiling) for group, key in launch_keys for tiling in key.tilings]

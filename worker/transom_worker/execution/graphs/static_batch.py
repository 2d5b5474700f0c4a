"""The input arrays of one captured size, at fixed addresses: written on the host, and copied to the device at once.

A step with fewer sequences than the size is padded, in a way that changes nothing: each padding sequence has one work item that
reads no key and writes zeros, its token is written to the dump block (which no sequence owns), and its logits are not read.
Programs beyond those have no tokens.

Legend: B sequences of the size, N table columns, W work items and J combined sequences of an attention layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.launches import AttentionLaunch, LaunchKey, set_launches
from transom_kernels.paged_attention.work_items import ITEM_FIELDS, NO_PARTIAL, Work, WorkPlan, plan_work
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.graphs.decode_sizes import DecodeSize, DecodeSizes, StepSize
from transom_worker.models.layers.forward_batch import ForwardBatch

ALIGNMENT = 64  # of each array, because kernels are compiled for pointers that are multiples of 16, as torch's own are
BEFORE_ALL = -1  # the position of a padding sequence's query, which lies before every key

Array = NDArray[np.int64] | NDArray[np.int32]
GroupLaunchKey = tuple[int, LaunchKey]  # index of a group, and the key of one kind of its attention layers


def plan_work_by_key(arrays: StepArrays, launch_keys: Sequence[GroupLaunchKey]) -> list[WorkPlan]:
    """Return a decode step's work items for each launch key."""
    return [plan_work(arrays.groups[index], key.rule, key.tilings[0]) for index, key in launch_keys]


def size_of(arrays: StepArrays, work_plans: Sequence[WorkPlan]) -> StepSize:
    """Return what a step needs."""
    return StepSize(
        num_seqs=len(arrays.token_ids),
        num_items=max((len(work.items) for work in work_plans), default=0),
        has_combine_items=any(len(work.combine_items) for work in work_plans),
        num_columns=tuple(group.block_table.shape[1] for group in arrays.groups),
    )


class StaticBatch:
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
        self._launch_keys, self._builder, self._num_seqs = tuple(launch_keys), builder, size.num_seqs
        self._host: dict[str, Array] = {}
        self._device: dict[str, torch.Tensor] = {}
        begin = 0
        for name, (shape, dtype) in _fields(size, sizes, launch_keys, builder).items():
            end = begin + int(np.prod(shape)) * dtype.itemsize
            self._host[name] = host.numpy()[begin:end].view(dtype).reshape(shape)
            self._device[name] = device[begin:end].view(_torch_dtype(dtype)).view(shape)
            begin = _aligned(end)
        self.num_bytes = begin

    def write(self, arrays: StepArrays, work_plans: Sequence[WorkPlan]) -> None:
        """Write a step that fits into the size to the host buffer."""
        to, num_real, layout = self._host, len(arrays.token_ids), self._builder.layout
        _fill(to["token_ids"], arrays.token_ids)
        _fill(to["positions"], arrays.rows.positions)
        _fill(to["start"], arrays.rows.start)
        to["logit_rows"][:] = np.arange(self._num_seqs)
        to["query_offset"][:] = np.arange(self._num_seqs + 1)
        for index, group in enumerate(arrays.groups):
            table = to[f"block_table {index}"]
            table[:num_real, : group.block_table.shape[1]] = group.block_table  # other columns are not read
            _fill(to[f"first_block {index}"], group.first_block)
            _fill(to[f"attend_from {index}"], group.attend_from_host)
            _fill(to[f"slots {index}"], group.slots, padding=layout.dump_block(index) * group.block_size)
        for index, work in enumerate(work_plans):
            self._with_padding(work, num_real).write(to[f"items {index}"], to[f"combine_items {index}"])  # type: ignore[arg-type]

    def forward_batch(self) -> ForwardBatch:
        """Return a `ForwardBatch` over the device buffer.

        Each forward pass needs a new one, because its scratch must not outlive the pass. The batch has none of the lists that
        operators read on the host: when the graph is replayed, those would belong to another step.
        """
        on, builder = self._device, self._builder
        groups = tuple(self._paged_batch(index) for index in range(len(builder.layout.groups)))
        for index, (group, key) in enumerate(self._launch_keys):
            items, combine_items = on[f"items {index}"], on[f"combine_items {index}"]
            work = Work(items=items, combine_items=combine_items, num_partials=len(items) if len(combine_items) else 0)
            set_launches(groups[group], key, [AttentionLaunch(work, key.tilings[0].tile_tokens)])
        return ForwardBatch(
            token_ids=on["token_ids"],
            positions=on["positions"],
            groups=groups,
            group_of_layer=builder.group_of_layer,
            caches=builder.caches,
            logit_rows=on["logit_rows"],
        )

    def _with_padding(self, work: WorkPlan, num_real: int) -> WorkPlan:
        """The step's work items, and one work item that sees no key for each padding sequence."""
        padding = np.zeros((self._num_seqs - num_real, ITEM_FIELDS), dtype=np.int32)
        row, tokens, position, sequence, partial = 0, 1, 2, 3, 8  # fields of a work item, see `work_items`
        padding[:, row] = padding[:, sequence] = np.arange(num_real, self._num_seqs)
        padding[:, tokens], padding[:, position], padding[:, partial] = 1, BEFORE_ALL, NO_PARTIAL
        return replace(work, items=np.concatenate([work.items, padding]))

    def _paged_batch(self, index: int) -> PagedBatch:
        group, on = self._builder.layout.groups[index], self._device
        return PagedBatch(
            block_size=group.rows_per_block,
            num_sink_blocks=group.spec.num_sink_blocks,
            block_table=on[f"block_table {index}"],
            first_block=on[f"first_block {index}"],
            attend_from=on[f"attend_from {index}"],
            slots=on[f"slots {index}"],
            query_offset=on["query_offset"],
            start=on["start"],
            block_table_host=[],
            first_block_host=[],
            attend_from_host=[],
            start_host=[],
            count_host=[],
        )


def buffer_bytes(
    size: DecodeSize, sizes: DecodeSizes, launch_keys: Sequence[GroupLaunchKey], builder: BatchBuilder
) -> int:
    """Return the bytes of a size's arrays."""
    fields = _fields(size, sizes, launch_keys, builder).values()
    return sum(_aligned(int(np.prod(shape)) * dtype.itemsize) for shape, dtype in fields)


def _fields(
    size: DecodeSize, sizes: DecodeSizes, launch_keys: Sequence[GroupLaunchKey], builder: BatchBuilder
) -> dict[str, tuple[tuple[int, ...], np.dtype[np.int64] | np.dtype[np.int32]]]:
    """Return the name, shape and dtype of every array, in order."""
    long, short, num = np.dtype(np.int64), np.dtype(np.int32), size.num_seqs
    fields: dict[str, tuple[tuple[int, ...], np.dtype[np.int64] | np.dtype[np.int32]]] = {
        "token_ids": ((num,), long),
        "positions": ((num,), long),
        "logit_rows": ((num,), long),
        "start": ((num,), short),
        "query_offset": ((num + 1,), short),
    }
    for group in range(len(builder.layout.groups)):
        fields[f"block_table {group}"] = ((num, sizes.num_columns(size, group)), short)
        fields[f"first_block {group}"] = ((num,), short)
        fields[f"attend_from {group}"] = ((num,), short)
        fields[f"slots {group}"] = ((num,), long)
    for index in range(len(launch_keys)):
        fields[f"items {index}"] = ((sizes.num_items(size), ITEM_FIELDS), short)
        fields[f"combine_items {index}"] = ((sizes.num_combine_items(size), 4), short)
    return fields


def _fill(array: Array, values: Array | list[int], *, padding: int = 0) -> None:
    """Write the step's values, and `padding` behind them."""
    array[: len(values)], array[len(values) :] = values, padding


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _torch_dtype(dtype: np.dtype[np.int64] | np.dtype[np.int32]) -> torch.dtype:
    return torch.int64 if dtype.itemsize == 8 else torch.int32

"""A decode step's inputs where a captured graph looks for them: written on the host, and brought to the device in one copy.

What is added to bring a step to its size is harmless: each added sequence has one program that reads no key and writes zeros, its
token goes to the dump block, and nobody looks at its logits. Programs beyond those have no tokens.

Legend: B sequences of the size, N table columns, W programs and J combine_items of a kind of attention layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.launches import AttentionLaunch, LaunchKey, set_launches
from transom_kernels.paged_attention.work_items import ITEM_FIELDS, Work, WorkPlan, plan_work
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.graphs.decode_sizes import DecodeSize, DecodeSizes, StepSize
from transom_worker.layers.forward_batch import ForwardBatch

ALIGNMENT = 64  # of each array: kernels are compiled for pointers that are multiples of 16 as torch's own are
BEFORE_ALL = -1  # a position at which an added sequence's query sees no key

Array = NDArray[np.int64] | NDArray[np.int32]
GroupLaunchKey = tuple[int, LaunchKey]  # a group, and what one kind of its layers launch_keys for


def plan_work_by_key(arrays: StepArrays, launch_keys: Sequence[GroupLaunchKey]) -> list[WorkPlan]:
    """A decode step's programs, by ask."""
    return [plan_work(arrays.groups[index], asked.rule, asked.tilings[0]) for index, asked in launch_keys]


def requirements_of(arrays: StepArrays, works: Sequence[WorkPlan]) -> StepSize:
    """The room that a step takes."""
    return StepSize(
        num_seqs=len(arrays.token_ids),
        num_items=max((len(work.items) for work in works), default=0),
        has_combine_items=any(len(work.combine_items) for work in works),
        num_columns=tuple(group.block_table.shape[1] for group in arrays.groups),
    )


class StaticBatch:
    """One size's arrays in a host buffer and a device buffer, which other sizes use too."""

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
        """Buffers are bytes, at least `bytes_of(size)` of them."""
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

    def write(self, arrays: StepArrays, works: Sequence[WorkPlan]) -> None:
        """Fill the host's side with a step that the size has room for."""
        to, real, layout = self._host, len(arrays.token_ids), self._builder.layout
        _fill(to["token_ids"], arrays.token_ids)
        _fill(to["positions"], arrays.spans.positions)
        _fill(to["start"], arrays.spans.start)
        to["logit_rows"][:] = np.arange(self._num_seqs)
        to["query_offset"][:] = np.arange(self._num_seqs + 1)
        for index, group in enumerate(arrays.groups):
            table = to[f"block_table {index}"]
            table[:real, : group.block_table.shape[1]] = group.block_table  # other columns are not read
            _fill(to[f"first_block {index}"], group.first_block)
            _fill(to[f"attend_from {index}"], group.attend_from_host)
            _fill(to[f"slots {index}"], group.slots, added=layout.dump_block(index) * group.block_size)
        for index, work in enumerate(works):
            self._with_added(work, real).write(to[f"items {index}"], to[f"combine_items {index}"])  # type: ignore[arg-type]

    def forward_batch(self) -> ForwardBatch:
        """The device's side. New for each forward pass, whose scratch must not outlive it, and without the host's numbers: they
        are another step's when the graph is replayed."""
        on, builder = self._device, self._builder
        groups = tuple(self._paged_batch(index) for index in range(len(builder.layout.groups)))
        for index, (group, asked) in enumerate(self._launch_keys):
            items, combine_items = on[f"items {index}"], on[f"combine_items {index}"]
            work = Work(items=items, combine_items=combine_items, num_partials=len(items) if len(combine_items) else 0)
            set_launches(groups[group], asked, [AttentionLaunch(work, asked.tilings[0].tile_tokens)])
        return ForwardBatch(
            token_ids=on["token_ids"],
            positions=on["positions"],
            groups=groups,
            group_of_layer=builder.group_of_layer,
            caches=builder.caches,
            logit_rows=on["logit_rows"],
        )

    def _with_added(self, work: WorkPlan, num_real: int) -> WorkPlan:
        """The step's programs, and one for each added sequence, which sees no key."""
        added = np.zeros((self._num_seqs - num_real, ITEM_FIELDS), dtype=np.int32)
        added[:, 0] = added[:, 3] = np.arange(num_real, self._num_seqs)  # its row and its sequence
        added[:, 1], added[:, 2], added[:, 8] = 1, BEFORE_ALL, -1
        return replace(work, items=np.concatenate([work.items, added]))

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


def bytes_of(size: DecodeSize, sizes: DecodeSizes, launch_keys: Sequence[GroupLaunchKey], builder: BatchBuilder) -> int:
    """Bytes of a size's arrays."""
    fields = _fields(size, sizes, launch_keys, builder).values()
    return sum(_aligned(int(np.prod(shape)) * dtype.itemsize) for shape, dtype in fields)


def _fields(
    size: DecodeSize, sizes: DecodeSizes, launch_keys: Sequence[GroupLaunchKey], builder: BatchBuilder
) -> dict[str, tuple[tuple[int, ...], np.dtype[np.int64] | np.dtype[np.int32]]]:
    """Every array's shape and kind, in order."""
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


def _fill(array: Array, values: Array | list[int], *, added: int = 0) -> None:
    """The step's values, and `added` behind them."""
    array[: len(values)], array[len(values) :] = values, added


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _torch_dtype(dtype: np.dtype[np.int64] | np.dtype[np.int32]) -> torch.dtype:
    return torch.int64 if dtype.itemsize == 8 else torch.int32

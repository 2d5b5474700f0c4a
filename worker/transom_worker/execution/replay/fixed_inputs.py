"""Holds the inputs of decode steps in arrays at fixed addresses, which every replay of a recorded step reads again.

    write(arrays, n)    write a step, padded to n sequences, into the host's arrays
    forward_batch(n)    return tensors over the arrays of n sequences, for the forward pass that is recorded

Padding changes nothing: a padding sequence writes its token to the dump block, which no sequence owns, and its logits are not
read.

Legend: B sequences of a step, each with one new token; N table columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.paged_attention.inputs import PagedBatch
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.uploads import Field, Fields, packed_views

LONG, INT, FLOAT = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)

Values = NDArray[np.int64] | NDArray[np.int32] | list[int]


def step_fields(builder: BatchBuilder, num_seqs: int, num_columns: Sequence[int]) -> dict[str, Field]:
    """Return the arrays of steps of up to `num_seqs` sequences; `num_columns` are the table columns of each group."""
    fields: dict[str, Field] = {
        "token_ids": ((num_seqs,), LONG),
        "positions": ((num_seqs,), LONG),
        "logit_rows": ((num_seqs,), LONG),
        "start": ((num_seqs,), INT),
        "query_offset": ((num_seqs + 1,), INT),
    }
    for group in range(len(builder.layout.groups)):
        fields[f"block_table {group}"] = ((num_seqs, num_columns[group]), INT)
        fields[f"first_block {group}"] = ((num_seqs,), INT)
        fields[f"attend_from {group}"] = ((num_seqs,), INT)
        fields[f"slots {group}"] = ((num_seqs,), LONG)
    return fields


@dataclass(slots=True, kw_only=True)
class FixedArrays:
    """Arrays by name: the host writes `host`, and forward passes read `device`."""

    host: dict[str, NDArray[np.generic]]
    device: dict[str, torch.Tensor]

    @staticmethod
    def on_cpu(fields: Fields) -> FixedArrays:
        """Return zeroed arrays for forward passes on CPUs, which read what the host writes.

        Each array has memory of its own, so that checked kernels notice an access outside it. The system provides the memory when a
        step first writes to it.
        """
        host = {name: np.zeros(shape, dtype) for name, (shape, dtype) in fields.items()}
        return FixedArrays(host=host, device={name: torch.from_numpy(array) for name, array in host.items()})

    @staticmethod
    def packed(fields: Fields, host: torch.Tensor, device: torch.Tensor) -> FixedArrays:
        """Lay the arrays out in two buffers of at least `packed_bytes(fields)` bytes, so that one copy brings all of them to the
        device."""
        on_host = {name: tensor.numpy() for name, tensor in packed_views(fields, host).items()}
        return FixedArrays(host=on_host, device=packed_views(fields, device))


class FixedInputs:
    """A decode step in fixed arrays. `arrays` has at least the arrays of `step_fields`."""

    def __init__(self, builder: BatchBuilder, arrays: FixedArrays) -> None:
        self._builder, self.arrays = builder, arrays
        self._counts = np.arange(len(arrays.host["query_offset"]))

    def write(self, arrays: StepArrays, num_seqs: int) -> None:
        """Write a step, and padding up to `num_seqs` sequences. Table columns after the step's own are not read."""
        self.write_tokens(arrays, num_seqs)
        for index, group in enumerate(arrays.groups):
            self.write_table(f"block_table {index}", group.block_table)
            self._fill(f"first_block {index}", group.first_block, num_seqs)
            self._fill(f"attend_from {index}", group.attend_from_host, num_seqs)

    def write_tokens(self, arrays: StepArrays, num_seqs: int) -> None:
        """Write what steps with and without KV policies have in common: the tokens, and the slots of their keys and values."""
        to, layout = self.arrays.host, self._builder.layout
        self._fill("token_ids", arrays.token_ids, num_seqs)
        self._fill("positions", arrays.rows.positions, num_seqs)
        self._fill("start", arrays.rows.start, num_seqs)
        to["logit_rows"][:num_seqs] = self._counts[:num_seqs]
        to["query_offset"][: num_seqs + 1] = self._counts[: num_seqs + 1]
        for index, group in enumerate(arrays.groups):
            self._fill(f"slots {index}", group.slots, num_seqs, padding=layout.dump_block(index) * group.block_size)

    def write_table(self, name: str, table: NDArray[np.int32]) -> None:
        """Write a step's [B, N] numbers into the array `name`, which is at least as large."""
        self.arrays.host[name][: table.shape[0], : table.shape[1]] = table

    def forward_batch(self, num_seqs: int) -> ForwardBatch:
        """Return the first `num_seqs` sequences' inputs.

        Each forward pass needs a new batch, because the scratch memory in it must not outlive the pass. The lists that operators
        read on the host are empty: in a replay they would belong to another step.
        """
        on, builder = self.arrays.device, self._builder
        return ForwardBatch(
            token_ids=on["token_ids"][:num_seqs],
            positions=on["positions"][:num_seqs],
            groups=tuple(self.paged_batch(index, num_seqs) for index in range(len(builder.layout.groups))),
            group_of_layer=builder.group_of_layer,
            caches=builder.caches,
            logit_rows=on["logit_rows"][:num_seqs],
        )

    def paged_batch(self, index: int, num_seqs: int) -> PagedBatch:
        """Return the attention metadata of a group."""
        group, on = self._builder.layout.groups[index], self.arrays.device
        return PagedBatch(
            block_size=group.rows_per_block,
            num_sink_blocks=group.spec.num_sink_blocks,
            block_table=on[f"block_table {index}"][:num_seqs],
            first_block=on[f"first_block {index}"][:num_seqs],
            attend_from=on[f"attend_from {index}"][:num_seqs],
            slots=on[f"slots {index}"][:num_seqs],
            query_offset=on["query_offset"][: num_seqs + 1],
            start=on["start"][:num_seqs],
            block_table_host=[],
            first_block_host=[],
            attend_from_host=[],
            start_host=[],
            count_host=[],
        )

    def _fill(self, name: str, values: Values, num_seqs: int, *, padding: int = 0) -> None:
        """Write the step's values, and `padding` for the padding sequences."""
        array = self.arrays.host[name]
        array[: len(values)], array[len(values) : num_seqs] = values, padding

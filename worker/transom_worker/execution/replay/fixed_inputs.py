"""Holds the inputs of a step in arrays at fixed addresses, which every replay of a recorded step reads again.

    write(arrays, n)            write a step, padded to n sequences, into the host's arrays
    clear_mass()                if the step adds up attention mass
    forward_batch(n, policy)    return tensors over the arrays of n sequences, for the forward pass that is recorded
    block_mass                  after the pass

Padding changes nothing: a padding sequence writes its token to the dump block, which no sequence owns, and its logits are not
read. In a mixed step, padding tokens belong to no sequence, padding sequences have no tokens, and row 0 is repeated as logit row.

Recorded programs on CPUs also run steps in which some row has a KV policy. (With CUDA graphs such steps run eagerly.) All rows of
such a step are computed as policy rows, with compact block tables (`batch.block_tables`), and without padding.

Legend: B sequences of a step, each with one new token unless the step is mixed; N table columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from transom_worker.execution.batch.batch import POLICY_TENSORS, BatchBuilder
from transom_worker.execution.batch.block_tables import NO_BLOCK
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.replay.decode_replay import PolicyVariant
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.policy_rows import MassMeter, MixedBatch
from transom_worker.scheduling.step import NO_ADAPTER
from transom_worker.uploads import Field, Fields, packed_views

LONG, INT, FLOAT = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)

_POLICY_ROWS = ("num_columns", "window", "sinks")  # a number for each row
_SINK_POSITIONS = "policy positions"

Values = NDArray[np.int64] | NDArray[np.int32] | list[int]


def step_fields(
    builder: BatchBuilder, num_seqs: int, num_columns: Sequence[int], *, num_tokens: int | None = None
) -> dict[str, Field]:
    """Return the arrays of steps of up to `num_seqs` sequences and `num_tokens` tokens, by default one for each sequence;
    `num_columns` are the table columns of each group."""
    num_tokens = num_tokens or num_seqs
    fields: dict[str, Field] = {
        "token_ids": ((num_tokens,), LONG),
        "positions": ((num_tokens,), LONG),
        "logit_rows": ((num_seqs,), LONG),
        "start": ((num_seqs,), INT),
        "query_offset": ((num_seqs + 1,), INT),
    }
    if builder.takes_adapters:
        fields["adapter_slots"] = ((num_tokens,), INT)
    for group in range(len(builder.layout.groups)):
        fields[f"block_table {group}"] = ((num_seqs, num_columns[group]), INT)
        fields[f"first_block {group}"] = ((num_seqs,), INT)
        fields[f"attend_from {group}"] = ((num_seqs,), INT)
        fields[f"slots {group}"] = ((num_tokens,), LONG)
    return fields


def policy_fields(steps: Fields) -> dict[str, Field]:
    """Return the arrays that steps with KV policies need in addition to those of `step_fields`.

    The name of a group's array ends with the group's index: `window 0`. `mass` has one sum for each entry of the block table.
    """
    (num_seqs,), _ = steps["token_ids"]
    fields: dict[str, Field] = {_SINK_POSITIONS: ((num_seqs,), LONG)}
    for name in [name for name in steps if name.startswith("block_table")]:
        group = name.split()[1]
        fields[f"key_blocks {group}"] = (steps[name][0], INT)
        fields[f"mass {group}"] = (steps[name][0], FLOAT)
        for row in _POLICY_ROWS:
            fields[f"{row} {group}"] = ((num_seqs,), INT)
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
    """A decode step in fixed arrays. `arrays` has at least the arrays of `step_fields`; for steps with KV policies also those of
    `policy_fields`."""

    def __init__(self, builder: BatchBuilder, arrays: FixedArrays) -> None:
        self._builder, self.arrays = builder, arrays
        self._counts = np.arange(len(arrays.host["query_offset"]))

    @property
    def block_mass(self) -> torch.Tensor:
        """The attention mass that layers of group 0 have added up since `clear_mass`, [at least B, at least N]."""
        return self.arrays.device["mass 0"]

    def clear_mass(self) -> None:
        """Set the attention mass to zero, so that the next forward pass begins a new sum."""
        for index in range(len(self._builder.layout.groups)):
            self.arrays.host[f"mass {index}"].fill(0.0)

    def write(self, arrays: StepArrays, num_seqs: int, mixed_tokens: int = 0) -> None:
        """Write a step, and padding up to `num_seqs` sequences, and up to `mixed_tokens` tokens if the step is mixed. Table columns
        after the step's own are not read.

        If any row has a KV policy, all must be policy rows.
        """
        to, layout, num_tokens = self.arrays.host, self._builder.layout, mixed_tokens or num_seqs
        self._fill("token_ids", arrays.token_ids, num_tokens)
        self._fill("positions", arrays.rows.positions, num_tokens)
        self._fill("start", arrays.rows.start, num_seqs)
        if "adapter_slots" in to:
            slots: Values = [] if arrays.adapter_slots is None else arrays.adapter_slots
            self._fill("adapter_slots", slots, num_tokens, padding=NO_ADAPTER)
        if mixed_tokens:
            self._fill("logit_rows", arrays.logit_rows, num_seqs)
            self._fill("query_offset", arrays.rows.offset, num_seqs + 1, padding=len(arrays.token_ids))
        else:
            to["logit_rows"][:num_seqs] = self._counts[:num_seqs]
            to["query_offset"][: num_seqs + 1] = self._counts[: num_seqs + 1]
        for index, group in enumerate(arrays.groups):
            self._fill(f"slots {index}", group.slots, num_tokens, padding=layout.dump_block(index) * group.block_size)
        if arrays.has_policies:
            self._write_policies(arrays, num_seqs)
            return
        for index, group in enumerate(arrays.groups):
            self._write_table(f"block_table {index}", group.block_table)
            # Padding has no state, and no rows that an indexer could read: it is at position 0, so it names at most two columns.
            to[f"block_table {index}"][len(group.block_table) : num_seqs, :2] = NO_BLOCK
            first = NO_BLOCK if layout.groups[index].spec.is_state else 0
            self._fill(f"first_block {index}", group.first_block, num_seqs, padding=first)
            self._fill(f"attend_from {index}", group.attend_from_host, num_seqs)

    def forward_batch(
        self, num_seqs: int, policy: PolicyVariant | None = None, *, has_adapters: bool = False
    ) -> ForwardBatch:
        """Return the first `num_seqs` sequences' inputs; without `has_adapters`, as if no sequence had a LoRA adapter.

        Each forward pass needs a new batch, because the scratch memory in it must not outlive the pass.
        """
        rows = self._views(num_seqs)
        if not has_adapters:
            rows.pop("adapter_slots", None)
        if policy is None:
            return self._builder.batch_of(rows)
        groups, none = range(len(self._builder.layout.groups)), self._views(0)
        step = ("token_ids", "positions", "logit_rows", "adapter_slots")
        on: dict[str, torch.Tensor] = {name: rows[name] for name in step if name in rows}
        if policy.passes_trained_len:
            on["sink_positions"] = rows[_SINK_POSITIONS]
        for index in groups:  # no ordinary rows, and slots of all rows
            on |= {f"{name} {index}": none[f"{name} {index}"] for name in ("block_table", "first_block", "attend_from")}
            on |= {f"start {index}": none["start"], f"query_offset {index}": none["query_offset"]}
            on[f"slots {index}"] = rows[f"slots {index}"]
            for name in POLICY_TENSORS:
                on[f"policy {index} {name}"] = rows[name] if name in rows else rows[f"{name} {index}"]
        batch = self._builder.batch_of(on)
        for index, group in enumerate(batch.groups):
            if policy.wants_mass and isinstance(group, MixedBatch):
                group.meter = MassMeter(block_mass=rows[f"mass {index}"])
        return batch

    def _views(self, num_seqs: int) -> dict[str, torch.Tensor]:
        """Return the first `num_seqs` elements of each array; `query_offset` has one more."""
        device = self.arrays.device
        return {name: array[: num_seqs + (name == "query_offset")] for name, array in device.items()}

    def _write_policies(self, arrays: StepArrays, num_seqs: int) -> None:
        self._fill(_SINK_POSITIONS, self._builder.sink_positions(arrays), num_seqs)
        for index, group in enumerate(arrays.groups):
            policies = group.policies
            assert policies is not None
            self._write_table(f"block_table {index}", policies.block_table)
            self._write_table(f"key_blocks {index}", policies.key_blocks)
            for name in _POLICY_ROWS:
                self._fill(f"{name} {index}", getattr(policies, name), num_seqs)

    def _write_table(self, name: str, table: NDArray[np.int32]) -> None:
        """Write a step's [B, N] numbers into the array `name`, which is at least as large."""
        self.arrays.host[name][: table.shape[0], : table.shape[1]] = table

    def _fill(self, name: str, values: Values, num: int, *, padding: int = 0) -> None:
        """Write the step's values, and `padding` up to `num` values."""
        array = self.arrays.host[name]
        array[: len(values)], array[len(values) : num] = values, padding

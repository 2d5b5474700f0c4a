"""Turns a step's numpy arrays into the tensors of a forward pass. A GPU gets them in one copy; a CPU reads the arrays themselves.

- slab: the tensor of bytes that is a rank's KV pool.
- group: the layers that share block tables.
- policy row: a row of a sequence with a KV policy, which keeps only a part of its keys. Its tables are compact (`block_tables`),
  and the operator `policy_attention` computes it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transom_core.kv_cache.groups import GroupKind
from transom_core.kv_cache.layout import ArenaLayout
from transom_kernels.launch import uses_cpu_kernels, uses_triton
from transom_kernels.paged_attention.inputs import PagedBatch
from transom_kernels.policy_attention import PolicyBatch
from transom_worker.execution.batch.policy_arrays import PolicyArrays
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.batch.split_rows import split_rows
from transom_worker.execution.batch.step_arrays import GroupArrays, RowRanges, StepArrays, row_ranges, step_arrays
from transom_worker.execution.tiers.slabs import compressed_caches, group_of_layer, layer_caches
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.policy_rows import MassMeter, MixedBatch
from transom_worker.scheduling.step import StepPlan
from transom_worker.uploads import uploads_to

Tensors = Mapping[str, torch.Tensor]

# The tensors of a `PolicyBatch`; `PolicyArrays` has the same field names.
POLICY_TENSORS = ("block_table", "key_blocks", "num_columns", "window", "sinks", "start", "query_offset")

# Attention over keys that are written before any is read. Recurrent states change from token to token, and latent keys are read in
# another form for prompts.
_SPLIT_KINDS = (GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNK, GroupKind.SINKS_WINDOW)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRows:
    """One group's inputs of a pass in which rows attend to all keys, to measure what their KV policies drop."""

    slots: NDArray[np.int64]
    everything: PolicyArrays  # the tables and masks of this pass, with which the rows attend to all keys
    masked: PolicyArrays  # the tables and masks of their policies


class BatchBuilder:
    """Builds the `ForwardBatch` of each step over one slab, the memory of a rank's KV pool."""

    def __init__(
        self,
        layout: ArenaLayout,
        slab: torch.Tensor,
        device: torch.device,
        *,
        trained_len: int | None = None,
        takes_adapters: bool = False,
    ) -> None:
        """`trained_len` is the longest context that the model was trained with; rows without a KV policy never exceed it. With
        `takes_adapters`, sequences may have LoRA adapters."""
        self.layout, self.device, self.takes_adapters = layout, device, takes_adapters
        # Buffers for one upload per step are enough: a step that measures rows uploads two batches, but only after it has waited
        # for the step before it.
        self._uploads = uploads_to(device)
        self._trained_len = trained_len
        # With compiled CPU kernels, `policy_attention` gives an ordinary row the same bits as `paged_attention`. So all rows of a
        # decode step with any policy row can go through `policy_attention`, and one recorded program computes the step.
        self._joins_decodes = uses_cpu_kernels(slab)
        self._splits_rows = self._joins_decodes and all(group.spec.kind in _SPLIT_KINDS for group in layout.groups)
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
        if self._splits_rows:
            plan = split_rows(plan)
        return step_arrays(plan, store, self.layout, joins_decodes=self._joins_decodes)

    def batch(self, arrays: StepArrays) -> ForwardBatch:
        """Return these arrays as tensors on the device, with the caches of this slab."""
        return self.batch_of(self._uploads.tensors(self._named(arrays)), arrays)

    def _named(self, arrays: StepArrays) -> dict[str, NDArray[Any]]:
        """Return all arrays of a batch by name; the names of a group's arrays end in its number."""
        named: dict[str, NDArray[Any]] = {
            "token_ids": arrays.token_ids,
            "positions": arrays.rows.positions,
            "logit_rows": arrays.logit_rows,
            **_offsets_and_starts(arrays.rows, ""),
        }
        if arrays.adapter_slots is not None:
            named["adapter_slots"] = arrays.adapter_slots
        if arrays.has_policies and self.passes_trained_len(arrays):
            named["sink_positions"] = self.sink_positions(arrays)
        for index, group in enumerate(arrays.groups):
            named[f"block_table {index}"] = group.block_table
            named[f"first_block {index}"] = group.first_block.astype(np.int32)
            named[f"attend_from {index}"] = np.array(group.attend_from_host, dtype=np.int32)
            named[f"slots {index}"] = group.slots
            # The rows of compressed groups are entries; beside policy rows, a group's `rows` are only the other rows.
            if group.rows is not arrays.rows:
                named |= _offsets_and_starts(group.rows, f" {index}")
            if group.policies is not None:
                named |= _policies(group.policies, f"policy {index}")
                other_rows = np.setdiff1d(np.arange(len(group.slots)), group.policies.token_rows)
                if len(other_rows):
                    named[f"policy_rows {index}"] = group.policies.token_rows
                    named[f"other_rows {index}"] = other_rows
        return named

    def batch_of(self, on: Tensors, arrays: StepArrays | None = None) -> ForwardBatch:
        """Return the batch of the tensors `on`, with the caches of this slab. `_named` lists the names of the tensors.

        A pass that is recorded for replays has no `arrays`. The lists that operators read on the host are then empty, because in a
        replay they would belong to another step.
        """
        hosts = [None] * len(self.layout.groups) if arrays is None else arrays.groups
        return ForwardBatch(
            token_ids=on["token_ids"],
            positions=on["positions"],
            groups=tuple(self._paged_batch(index, on, host) for index, host in enumerate(hosts)),
            group_of_layer=self.group_of_layer,
            caches=self.caches,
            compressed=self._compressed,
            logit_rows=on["logit_rows"],
            adapter_slots=on.get("adapter_slots"),
            sink_positions=on.get("sink_positions"),
        )

    def sink_positions(self, arrays: StepArrays) -> NDArray[np.int64]:
        """Return the positions with which queries are rotated when they read sink tokens: at most the last trained position."""
        positions = arrays.rows.positions
        return positions if self._trained_len is None else np.minimum(positions, self._trained_len - 1)

    def passes_trained_len(self, arrays: StepArrays) -> bool:
        """Return whether a step has a token beyond the length that the model was trained with."""
        return self._trained_len is not None and int(arrays.rows.positions.max(initial=0)) >= self._trained_len

    def _paged_batch(self, index: int, on: Tensors, host: GroupArrays | None) -> PagedBatch:
        group, policy = self.layout.groups[index], f"policy {index}"
        rows = f" {index}" if f"start {index}" in on else ""  # most groups have the same rows as the step
        paged = PagedBatch(
            block_size=group.rows_per_block,
            num_sink_blocks=group.spec.num_sink_blocks,
            block_table=on[f"block_table {index}"],
            first_block=on[f"first_block {index}"],
            attend_from=on[f"attend_from {index}"],
            slots=on[f"slots {index}"],
            query_offset=on[f"query_offset{rows}"],
            start=on[f"start{rows}"],
            block_table_host=[] if host is None or self._kernels_read_tables else host.block_table.tolist(),
            first_block_host=[] if host is None else host.first_block_host,
            attend_from_host=[] if host is None else host.attend_from_host,
            start_host=[] if host is None else host.start_host,
            count_host=[] if host is None else host.count_host,
        )
        if f"{policy} window" not in on:
            return paged
        fields = {field.name: getattr(paged, field.name) for field in dataclasses.fields(paged)}
        counts = [] if host is None or host.policies is None else host.policies.count_host
        return MixedBatch(
            **fields,
            policies=_policy_batch(on, policy, group.rows_per_block, counts),
            policy_rows=on.get(f"policy_rows {index}"),
            other_rows=on.get(f"other_rows {index}"),
        )

    def measured_batch(
        self, arrays: StepArrays, tokens: list[int], groups: list[MeasuredRows], dropped: torch.Tensor
    ) -> ForwardBatch:
        """Return a batch of only the query tokens `tokens` of a step, in which they attend to all keys.

        For each token, layers add to `dropped` [tokens] the attention that goes to keys which the token's policy masks.
        """
        positions = arrays.rows.positions[tokens]
        count = len(tokens)
        # Every row is a policy row here, so the arrays of ordinary rows are empty.
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
            adapter_slots=None if arrays.adapter_slots is None else arrays.adapter_slots[tokens],
        )
        named = self._named(whole)
        for index, rows in enumerate(groups):
            named |= _policies(rows.masked, f"masked {index}")
        on = self._uploads.tensors(named)
        batch = self.batch_of(on, whole)
        for index, (group, rows) in enumerate(zip(batch.groups, groups, strict=True)):
            assert isinstance(group, MixedBatch)
            masked = _policy_batch(on, f"masked {index}", rows.masked.block_size, rows.masked.count_host)
            group.meter = MassMeter(dropped=dropped, masked=masked)
        return batch


def _offsets_and_starts(rows: RowRanges, suffix: str) -> dict[str, NDArray[np.int32]]:
    """Return `query_offset` and `start` of paged batches over these rows."""
    return {f"query_offset{suffix}": rows.offset.astype(np.int32), f"start{suffix}": rows.start.astype(np.int32)}


def _policies(arrays: PolicyArrays, prefix: str) -> dict[str, NDArray[np.int32]]:
    return {f"{prefix} {name}": getattr(arrays, name) for name in POLICY_TENSORS}


def _policy_batch(on: Tensors, prefix: str, block_size: int, count_host: list[int]) -> PolicyBatch:
    tensors: dict[str, Any] = {name: on[f"{prefix} {name}"] for name in POLICY_TENSORS}
    return PolicyBatch(block_size=block_size, count_host=count_host, **tensors)


def _rows_of(positions: NDArray[np.int64]) -> RowRanges:
    """Return ranges of one token each, at these positions."""
    return row_ranges(positions.tolist(), [1] * len(positions))

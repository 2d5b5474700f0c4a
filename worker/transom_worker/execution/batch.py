"""StepPlan and sequences to the forward pass's tensors.

Legend: B sequences, T tokens, R rows with logits, N table columns, P block size.

Everything is built in numpy over whole batches and becomes a tensor once; on CPUs a tensor shares numpy's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.execution.block_tables import BlockTables
from transom_worker.execution.sequences import SequenceStore
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.layers.forward_batch import ForwardBatch, LayerCache
from transom_worker.scheduling.step import StepPlan

Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Spans:
    """A plan's batch in numpy, shared by all groups."""

    table_rows: Ints  # [B] rows of the block tables
    start: Ints  # [B]
    count: Ints  # [B]
    offset: Ints  # [B + 1] first row of each sequence among the T
    row_of_token: Ints  # [T] batch row
    positions: Ints  # [T]


class BatchBuilder:
    """Builds ForwardBatches over one slab."""

    def __init__(
        self,
        layout: ArenaLayout,
        caches: tuple[LayerCache, ...],
        group_of_layer: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._layout, self._caches, self._group_of_layer, self._device = layout, caches, group_of_layer, device

    def build(self, plan: StepPlan, store: SequenceStore) -> ForwardBatch:
        """The forward pass that the plan asks for; deltas and new tokens are applied already.

        Raises:
            ValueError: a token that is to be written has no block.
        """
        sequences = [store[seq_id] for seq_id in plan.seq_ids]
        spans = _spans(plan, np.array([sequence.row for sequence in sequences], dtype=np.int64))
        ends = [start + count for start, count in zip(plan.start, plan.count, strict=True)]
        tokens = [s.tokens(start, end) for s, start, end in zip(sequences, plan.start, ends, strict=True)]
        query_offset, start_B = self._tensor(spans.offset.astype(np.int32)), self._tensor(spans.start.astype(np.int32))
        groups = tuple(
            self._paged_batch(index, tables, plan, spans, query_offset, start_B)
            for index, tables in enumerate(store.tables)
        )
        return ForwardBatch(
            token_ids=self._tensor(np.concatenate(tokens)),
            positions=self._tensor(spans.positions),
            groups=groups,
            group_of_layer=self._group_of_layer,
            caches=self._caches,
            logit_rows=self._tensor(_logit_rows(plan, spans)),
        )

    def _paged_batch(
        self,
        index: int,
        tables: BlockTables,
        plan: StepPlan,
        spans: Spans,
        query_offset: torch.Tensor,
        start: torch.Tensor,
    ) -> PagedBatch:
        block_table, first_block = tables.gather(spans.table_rows, spans.start + spans.count)
        slots = _slots(tables, block_table, first_block, spans, plan.write_from[index], self._layout.dump_block(index))
        return PagedBatch(
            block_size=tables.block_size,
            num_pinned_blocks=tables.num_pinned,
            block_table=self._tensor(block_table),
            first_block=self._tensor(first_block.astype(np.int32)),
            attend_from=self._tensor(np.array(plan.attend_from[index], dtype=np.int32)),
            slots=self._tensor(slots),
            query_offset=query_offset,
            start=start,
            block_table_host=block_table.tolist(),
            first_block_host=first_block.tolist(),
            attend_from_host=plan.attend_from[index],
            start_host=plan.start,
            count_host=plan.count,
        )

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def _spans(plan: StepPlan, table_rows: Ints) -> Spans:
    start, count = np.array(plan.start, dtype=np.int64), np.array(plan.count, dtype=np.int64)
    offset = np.zeros(len(count) + 1, dtype=np.int64)
    np.cumsum(count, out=offset[1:])
    row_of_token = np.repeat(np.arange(len(count)), count)
    positions = np.arange(offset[-1]) + (start - offset[:-1])[row_of_token]
    return Spans(
        table_rows=table_rows,
        start=start,
        count=count,
        offset=offset,
        row_of_token=row_of_token,
        positions=positions,
    )


def _slots(
    tables: BlockTables,
    block_table: NDArray[np.int32],
    first_block: Ints,
    spans: Spans,
    write_from: list[int],
    dump_block: int,
) -> Ints:
    """Where each token's K and V go, [T]; the dump block below `write_from`."""
    size, rows = tables.block_size, spans.row_of_token
    columns = tables.columns(spans.positions // size, first_block[rows])
    inside = (columns >= 0) & (columns < block_table.shape[1])
    blocks = block_table[rows, np.where(inside, columns, 0)].astype(np.int64)
    blocks[~inside] = -1
    masked = spans.positions < np.array(write_from, dtype=np.int64)[rows]
    blocks[masked] = dump_block
    if (blocks < 0).any():
        token = int(np.argmax(blocks < 0))
        raise ValueError(f"Position {spans.positions[token]} of batch row {rows[token]} has no block to be written to.")
    return blocks * size + spans.positions % size


def _logit_rows(plan: StepPlan, spans: Spans) -> Ints:
    """Rows of T whose logits are wanted, sequence by sequence, [R]."""
    logits_from = np.array(plan.logits_from, dtype=np.int64)
    if (spans.count == 1).all() and (logits_from == spans.start).all():
        return spans.offset[:-1].copy()
    return np.flatnonzero(spans.positions >= logits_from[spans.row_of_token])

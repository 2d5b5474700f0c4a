"""StepPlan and sequences to the forward pass's tensors.

Legend: B sequences, T tokens, R rows with logits, N table columns, P rows per block.

Everything is built in numpy over whole batches and becomes a tensor once; on CPUs a tensor shares numpy's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.launch import uses_triton
from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.execution.block_tables import BlockTables
from transom_worker.execution.sequences import SequenceStore
from transom_worker.execution.slab import compressed_caches, group_of_layer, layer_caches
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.layers.forward_batch import ForwardBatch
from transom_worker.scheduling.step import StepPlan

Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Spans:
    """Rows that a step computes of each sequence: of tokens, or of the compressed entries that it closes."""

    start: Ints  # [B]
    count: Ints  # [B]
    offset: Ints  # [B + 1] first row of each sequence among the T
    row_of_token: Ints  # [T] batch row
    positions: Ints  # [T]
    start_host: list[int]
    count_host: list[int]


class BatchBuilder:
    """Builds ForwardBatches over one slab."""

    def __init__(self, layout: ArenaLayout, slab: torch.Tensor, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._caches, self._compressed = layer_caches(layout, slab), compressed_caches(layout, slab)
        self._group_of_layer = group_of_layer(layout)
        # Triton's kernels do: a list of a long batch's tables takes milliseconds
        self._finds_blocks_itself = uses_triton(slab)

    def build(self, plan: StepPlan, store: SequenceStore) -> ForwardBatch:
        """The forward pass that the plan asks for; deltas and new tokens are applied already.

        Raises:
            ValueError: a token that is to be written has no block.
        """
        sequences = [store[seq_id] for seq_id in plan.seq_ids]
        table_rows = np.array([sequence.row for sequence in sequences], dtype=np.int64)
        spans = _spans(plan.start, plan.count)
        ends = [start + count for start, count in zip(plan.start, plan.count, strict=True)]
        tokens = [s.tokens(start, end) for s, start, end in zip(sequences, plan.start, ends, strict=True)]
        bounds = self._bounds(spans)
        return ForwardBatch(
            token_ids=self._tensor(np.concatenate(tokens)),
            positions=self._tensor(spans.positions),
            groups=tuple(
                self._paged_batch(index, tables, plan, table_rows, spans, bounds)
                for index, tables in enumerate(store.tables)
            ),
            group_of_layer=self._group_of_layer,
            caches=self._caches,
            compressed=self._compressed,
            logit_rows=self._tensor(_logit_rows(plan, spans)),
        )

    def _paged_batch(
        self,
        index: int,
        tables: BlockTables,
        plan: StepPlan,
        table_rows: Ints,
        spans: Spans,
        bounds: tuple[torch.Tensor, torch.Tensor],
    ) -> PagedBatch:
        group = self._layout.groups[index]
        block_table, first_block = tables.gather(table_rows, spans.start + spans.count)
        attend_from, write_from = plan.attend_from[index], plan.write_from[index]
        if group.tokens_per_row > 1:
            spans = _entry_spans(spans, group.tokens_per_row, write_from)
            bounds = self._bounds(spans)
            attend_from = write_from = [0] * len(table_rows)
        places = _places(tables, group.rows_per_block, block_table, first_block, spans)
        slots = _slots(places, group.rows_per_block, spans, write_from, self._layout.dump_block(index))
        return PagedBatch(
            block_size=group.rows_per_block,
            num_pinned_blocks=tables.num_pinned,
            block_table=self._tensor(block_table),
            first_block=self._tensor(first_block.astype(np.int32)),
            attend_from=self._tensor(np.array(attend_from, dtype=np.int32)),
            slots=self._tensor(slots),
            query_offset=bounds[0],
            start=bounds[1],
            block_table_host=[] if self._finds_blocks_itself else block_table.tolist(),
            first_block_host=first_block.tolist(),
            attend_from_host=attend_from,
            start_host=spans.start_host,
            count_host=spans.count_host,
        )

    def _bounds(self, spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
        """`query_offset` and `start` of paged batches over these rows."""
        return self._tensor(spans.offset.astype(np.int32)), self._tensor(spans.start.astype(np.int32))

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def _spans(start_host: list[int], count_host: list[int]) -> Spans:
    start, count = np.array(start_host, dtype=np.int64), np.array(count_host, dtype=np.int64)
    offset = np.zeros(len(count) + 1, dtype=np.int64)
    np.cumsum(count, out=offset[1:])
    row_of_token = np.repeat(np.arange(len(count)), count)
    positions = np.arange(offset[-1]) + (start - offset[:-1])[row_of_token]
    return Spans(
        start=start,
        count=count,
        offset=offset,
        row_of_token=row_of_token,
        positions=positions,
        start_host=start_host,
        count_host=count_host,
    )


def _entry_spans(spans: Spans, ratio: int, write_from: list[int]) -> Spans:
    """Entries whose last token is computed here, at `write_from` or beyond: those before are in the cache."""
    first = np.array(write_from, dtype=np.int64) // ratio
    count = np.maximum(0, (spans.start + spans.count) // ratio - first)
    return _spans(first.tolist(), count.tolist())


def _places(
    tables: BlockTables, block_size: int, block_table: NDArray[np.int32], first_block: Ints, spans: Spans
) -> Ints:
    """The block of each row, [T]; -1 where there is none."""
    rows = spans.row_of_token
    columns = tables.columns(spans.positions // block_size, first_block[rows])
    inside = (columns >= 0) & (columns < block_table.shape[1])
    blocks = block_table[rows, np.where(inside, columns, 0)].astype(np.int64)
    blocks[~inside] = -1
    return blocks


def _slots(blocks: Ints, block_size: int, spans: Spans, write_from: list[int], dump_block: int) -> Ints:
    """Where each row is written, [T]; in the dump block below `write_from`."""
    rows = spans.row_of_token
    blocks[spans.positions < np.array(write_from, dtype=np.int64)[rows]] = dump_block
    if (blocks < 0).any():
        token = int(np.argmax(blocks < 0))
        raise ValueError(f"Position {spans.positions[token]} of batch row {rows[token]} has no block to be written to.")
    return blocks * block_size + spans.positions % block_size


def _logit_rows(plan: StepPlan, spans: Spans) -> Ints:
    """Rows of T whose logits are wanted, sequence by sequence, [R]."""
    logits_from = np.array(plan.logits_from, dtype=np.int64)
    if (spans.count == 1).all() and (logits_from == spans.start).all():
        return spans.offset[:-1].copy()
    return np.flatnonzero(spans.positions >= logits_from[spans.row_of_token])

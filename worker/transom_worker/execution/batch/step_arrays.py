"""StepPlan and sequences to the numbers that a forward pass reads, in numpy over whole batches.

Legend: B sequences, T tokens, R rows with logits, N table columns, P rows per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transom_worker.execution.batch.block_tables import BlockTables
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.scheduling.step import StepPlan

Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class RowRanges:
    """Rows that a step computes of each sequence: of tokens, or of the compressed entries that it closes."""

    start: Ints  # [B]
    count: Ints  # [B]
    offset: Ints  # [B + 1] first row of each sequence among the T
    row_of_token: Ints  # [T] batch row
    positions: Ints  # [T]
    start_host: list[int]
    count_host: list[int]


@dataclass(slots=True, kw_only=True)
class GroupArrays:
    """One group's side of a step: a `PagedBatch` on the host, whose programs can be planned."""

    block_size: int
    num_sink_blocks: int
    block_table: NDArray[np.int32]  # [B, N]
    first_block: Ints  # [B]
    attend_from_host: list[int]  # [B]
    slots: Ints  # [T]
    spans: RowRanges

    @property
    def first_block_host(self) -> list[int]:
        """`first_block`, [B]."""
        numbers: list[int] = self.first_block.tolist()
        return numbers

    @property
    def start_host(self) -> list[int]:
        """Positions of the first rows, [B]."""
        return self.spans.start_host

    @property
    def count_host(self) -> list[int]:
        """Numbers of rows, [B]."""
        return self.spans.count_host


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """A `ForwardBatch` on the host, without the caches."""

    token_ids: Ints  # [T]
    spans: RowRanges
    logit_rows: Ints  # [R]
    groups: tuple[GroupArrays, ...]

    @property
    def only_decodes(self) -> bool:
        """Whether every sequence computes one token and wants its logits."""
        return len(self.logit_rows) == len(self.token_ids) == len(self.spans.count) and bool(
            (self.spans.count == 1).all()
        )


def step_arrays(plan: StepPlan, store: SequenceStore, layout: ArenaLayout) -> StepArrays:
    """What the plan asks for; deltas and new tokens are applied already.

    Raises:
        ValueError: a token that is to be written has no block.
    """
    sequences = [store[seq_id] for seq_id in plan.seq_ids]
    table_rows = np.array([sequence.row for sequence in sequences], dtype=np.int64)
    spans = _spans(plan.start, plan.count)
    ends = [start + count for start, count in zip(plan.start, plan.count, strict=True)]
    tokens = [s.tokens(start, end) for s, start, end in zip(sequences, plan.start, ends, strict=True)]
    return StepArrays(
        token_ids=np.concatenate(tokens),
        spans=spans,
        logit_rows=_logit_rows(plan, spans),
        groups=tuple(
            _group_arrays(index, tables, plan, table_rows, spans, layout) for index, tables in enumerate(store.tables)
        ),
    )


def _group_arrays(
    index: int, tables: BlockTables, plan: StepPlan, table_rows: Ints, spans: RowRanges, layout: ArenaLayout
) -> GroupArrays:
    group = layout.groups[index]
    block_table, first_block = tables.gather(table_rows, spans.start + spans.count)
    attend_from, write_from = plan.attend_from[index], plan.write_from[index]
    if group.tokens_per_row > 1:
        spans = _entry_spans(spans, group.tokens_per_row, write_from)
        attend_from = write_from = [0] * len(table_rows)
    places = _places(tables, group.rows_per_block, block_table, first_block, spans)
    return GroupArrays(
        block_size=group.rows_per_block,
        num_sink_blocks=tables.num_sink_blocks,
        block_table=block_table,
        first_block=first_block,
        attend_from_host=attend_from,
        slots=_slots(places, group.rows_per_block, spans, write_from, layout.dump_block(index)),
        spans=spans,
    )


def _spans(start_host: list[int], count_host: list[int]) -> RowRanges:
    start, count = np.array(start_host, dtype=np.int64), np.array(count_host, dtype=np.int64)
    offset = np.zeros(len(count) + 1, dtype=np.int64)
    np.cumsum(count, out=offset[1:])
    row_of_token = np.repeat(np.arange(len(count)), count)
    positions = np.arange(offset[-1]) + (start - offset[:-1])[row_of_token]
    return RowRanges(
        start=start,
        count=count,
        offset=offset,
        row_of_token=row_of_token,
        positions=positions,
        start_host=start_host,
        count_host=count_host,
    )


def _entry_spans(spans: RowRanges, ratio: int, write_from: list[int]) -> RowRanges:
    """Entries whose last token is computed here, at `write_from` or beyond: those before are in the cache."""
    first = np.array(write_from, dtype=np.int64) // ratio
    count = np.maximum(0, (spans.start + spans.count) // ratio - first)
    return _spans(first.tolist(), count.tolist())


def _places(
    tables: BlockTables, block_size: int, block_table: NDArray[np.int32], first_block: Ints, spans: RowRanges
) -> Ints:
    """The block of each row, [T]; -1 where there is none."""
    rows = spans.row_of_token
    columns = tables.columns(spans.positions // block_size, first_block[rows])
    inside = (columns >= 0) & (columns < block_table.shape[1])
    blocks = block_table[rows, np.where(inside, columns, 0)].astype(np.int64)
    blocks[~inside] = -1
    return blocks


def _slots(blocks: Ints, block_size: int, spans: RowRanges, write_from: list[int], dump_block: int) -> Ints:
    """Where each row is written, [T]; in the dump block below `write_from`."""
    rows = spans.row_of_token
    blocks[spans.positions < np.array(write_from, dtype=np.int64)[rows]] = dump_block
    if (blocks < 0).any():
        token = int(np.argmax(blocks < 0))
        raise ValueError(f"Position {spans.positions[token]} of batch row {rows[token]} has no block to be written to.")
    return blocks * block_size + spans.positions % block_size


def _logit_rows(plan: StepPlan, spans: RowRanges) -> Ints:
    """Rows of T whose logits are wanted, sequence by sequence, [R]."""
    logits_from = np.array(plan.logits_from, dtype=np.int64)
    if (spans.count == 1).all() and (logits_from == spans.start).all():
        return spans.offset[:-1].copy()
    return np.flatnonzero(spans.positions >= logits_from[spans.row_of_token])

"""Turns a plan and the sequences into the numbers that a forward pass reads, in numpy over the whole batch.

- row: one token that the step computes, or, in a group of compressed layers, one compressed entry that the step completes.
- slot: where a row is written in a group's cache: block id x rows per block + index in the block.
- dump block: the block of a group that no sequence owns. The cache has rows below `write_from` already, so they are written there.
- policy row: a row of a sequence with a KV policy; its table is compact (`block_tables`), and `policy_attention` computes it.

Legend: B sequences, T rows, R rows with logits, N table columns, P rows per block.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.execution.batch.block_tables import NO_BLOCK, BlockTables, CompactTable
from transom_worker.execution.batch.policy_arrays import PolicyArrays, policy_arrays, slots_of
from transom_worker.execution.batch.sequences import SequenceStore, SequenceTokens
from transom_worker.scheduling.step import StepPlan

Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class RowRanges:
    """The rows that a step computes of each sequence."""

    start: Ints  # [B] position of each sequence's first row
    count: Ints  # [B] number of each sequence's rows
    offset: Ints  # [B + 1] each sequence's first row among the T
    row_of_token: Ints  # [T] which of the B sequences a row belongs to
    positions: Ints  # [T]
    start_host: list[int]
    count_host: list[int]

    @property
    def one_each(self) -> bool:
        """Return whether every sequence has exactly one row."""
        return self.count_host.count(1) == len(self.count_host)


@dataclass(slots=True, kw_only=True)
class GroupArrays:
    """One group's inputs of a step on the host: everything that planning attention work needs, with the field names of
    `PagedBatch`.

    In a group of snapshots, `first_block` has the block with the state that a sequence's rows begin with (NO_BLOCK: with zeros),
    and the one column of `block_table` the block in which they leave their state.
    """

    block_size: int
    num_sink_blocks: int
    block_table: NDArray[np.int32]  # [B, N]
    first_block: Ints  # [B]
    attend_from_host: list[int]  # [B]
    slots: Ints  # [T], of all rows of the step
    rows: RowRanges
    # Rows with KV policies. If there are any, the fields above, except `slots`, are about the other rows.
    policies: PolicyArrays | None = None

    @property
    def first_block_host(self) -> list[int]:
        """Return `first_block` as a list, [B]."""
        numbers: list[int] = self.first_block.tolist()
        return numbers

    @property
    def start_host(self) -> list[int]:
        """Return the position of each sequence's first row, [B]."""
        return self.rows.start_host

    @property
    def count_host(self) -> list[int]:
        """Return the number of each sequence's rows, [B]."""
        return self.rows.count_host


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """The numbers of a `ForwardBatch`, on the host and without the caches."""

    token_ids: Ints  # [T]
    rows: RowRanges
    logit_rows: Ints  # [R]
    groups: tuple[GroupArrays, ...]
    has_policies: bool = False
    adapter_slots: NDArray[np.int32] | None = None  # [T]; None: no token has an adapter

    @property
    def only_decodes(self) -> bool:
        """Return whether every sequence computes exactly one token and its logits."""
        return len(self.logit_rows) == len(self.token_ids) and self.rows.one_each


def step_arrays(
    plan: StepPlan, store: SequenceStore, layout: ArenaLayout, *, joins_decodes: bool = False
) -> StepArrays:
    """Return the numbers that the plan asks for. The sequences' new tokens and block tables must be up to date.

    With `joins_decodes`, a decode step in which any row has a KV policy treats all rows as policy rows.

    Raises:
        ValueError: a token that is to be written has no block.
    """
    sequences, table_rows = store.all_of(plan.seq_ids)
    rows = row_ranges(plan.start, plan.count)
    token_ids = store.token_ids(plan.seq_ids, rows.start, rows.start + rows.count)
    arrays = StepArrays(token_ids=token_ids, rows=rows, logit_rows=_logit_rows(plan, rows), groups=())
    arrays.has_policies = any([sequence.compact is not None for sequence in sequences])
    if not store.adapted.isdisjoint(plan.seq_ids):
        slots_B = np.array([sequence.adapter_slot for sequence in sequences], dtype=np.int32)
        arrays.adapter_slots = slots_B[rows.row_of_token]
    if arrays.has_policies:
        joined = joins_decodes and arrays.only_decodes
        groups = (
            _mixed_arrays(index, sequences, plan, rows, store, layout, joined=joined)
            for index in range(len(store.tables))
        )
    else:
        groups = (
            _group_arrays(index, tables, plan, table_rows, rows, layout) for index, tables in enumerate(store.tables)
        )
    arrays.groups = tuple(groups)
    return arrays


def _mixed_arrays(
    index: int,
    sequences: list[SequenceTokens],
    plan: StepPlan,
    rows: RowRanges,
    store: SequenceStore,
    layout: ArenaLayout,
    *,
    joined: bool,
) -> GroupArrays:
    """Return one group's arrays for a step in which some sequences have KV policies. If `joined`, the rows of the other sequences
    become policy rows too."""
    tables, size, dump_block = store.tables[index], layout.groups[index].rows_per_block, layout.dump_block(index)
    # Sequences without a KV policy (`ordinary`), with policy rows (`chosen`), and with rows that stay ordinary rows (`apart`).
    ordinary = [b for b, sequence in enumerate(sequences) if sequence.compact is None]
    chosen = [b for b in range(len(sequences)) if joined or sequences[b].compact is not None]
    apart = [] if joined else ordinary
    table_rows = np.array([sequences[b].row for b in ordinary], dtype=np.int64)
    slots = np.empty(len(rows.positions), dtype=np.int64)
    own = _chosen_rows(rows, ordinary)
    block_table, first_block = tables.gather(table_rows, own.start + own.count)
    write_from = [plan.write_from[index][b] for b in ordinary]
    blocks = _blocks_of_rows(tables, size, block_table, first_block, own)
    slots[_token_rows(rows, ordinary)] = _slots(blocks, size, own, write_from, dump_block)
    compact: list[CompactTable] = []
    for b in chosen:
        sequence = sequences[b]
        if sequence.compact is None:
            compact.append(tables.as_compact(sequence.row))
            continue
        compact.append(sequence.compact[index])
        inside = slice(int(rows.offset[b]), int(rows.offset[b + 1]))
        slots[inside] = slots_of(compact[-1], size, rows.positions[inside], plan.write_from[index][b], dump_block)
    policies = policy_arrays(
        compact,
        window=[plan.row_window[b] for b in chosen],
        sinks=[plan.row_sinks[b] for b in chosen],
        block_size=size,
        start=[plan.start[b] for b in chosen],
        count=[plan.count[b] for b in chosen],
        batch_rows=chosen,
        token_rows=_token_rows(rows, chosen),
    )
    return GroupArrays(
        block_size=size,
        num_sink_blocks=tables.num_sink_blocks,
        block_table=block_table[: len(apart)],
        first_block=first_block[: len(apart)],
        attend_from_host=[plan.attend_from[index][b] for b in apart],
        slots=slots,
        rows=_chosen_rows(rows, apart),
        policies=policies,
    )


def _chosen_rows(rows: RowRanges, chosen: list[int]) -> RowRanges:
    """Return the ranges of some of the sequences, as if they were a step of their own."""
    return row_ranges([rows.start_host[b] for b in chosen], [rows.count_host[b] for b in chosen])


def _token_rows(rows: RowRanges, chosen: list[int]) -> Ints:
    """Return which of the T rows belong to these sequences."""
    parts = [np.arange(rows.offset[b], rows.offset[b + 1]) for b in chosen]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _group_arrays(
    index: int, tables: BlockTables, plan: StepPlan, table_rows: Ints, rows: RowRanges, layout: ArenaLayout
) -> GroupArrays:
    group = layout.groups[index]
    if group.spec.is_state:
        return _state_arrays(tables, plan.attend_from[index], plan.write_from[index], table_rows, rows)
    block_table, first_block = tables.gather(table_rows, rows.start + rows.count)
    attend_from, write_from = plan.attend_from[index], plan.write_from[index]
    if group.tokens_per_row > 1:
        rows = _entry_rows(rows, group.tokens_per_row, write_from)
        # The rows are new entries only, so all of them are written, and queries may read every entry.
        attend_from = write_from = [0] * len(table_rows)
    blocks = _blocks_of_rows(tables, group.rows_per_block, block_table, first_block, rows)
    return GroupArrays(
        block_size=group.rows_per_block,
        num_sink_blocks=tables.num_sink_blocks,
        block_table=block_table,
        first_block=first_block,
        attend_from_host=attend_from,
        slots=_slots(blocks, group.rows_per_block, rows, write_from, layout.dump_block(index)),
        rows=rows,
    )


def _state_arrays(
    tables: BlockTables, read: list[int], written: list[int], table_rows: Ints, rows: RowRanges
) -> GroupArrays:
    """Return the arrays of a group of snapshots; `read` and `written` are the logical blocks that the plan names.

    Raises:
        ValueError: a sequence does not have such a block.
    """
    blocks = tables.blocks_at(table_rows, np.array([read, written], dtype=np.int64))
    return GroupArrays(
        block_size=1,
        num_sink_blocks=0,
        block_table=np.ascontiguousarray(blocks[1:].T, dtype=np.int32),
        first_block=blocks[0],
        attend_from_host=[0] * len(table_rows),
        slots=np.zeros(len(rows.positions), dtype=np.int64),
        rows=rows,
    )


def row_ranges(start_host: list[int], count_host: list[int]) -> RowRanges:
    """Return the rows of sequences that compute `count` tokens each, from position `start` on."""
    start, count = np.array(start_host, dtype=np.int64), np.array(count_host, dtype=np.int64)
    if count_host.count(1) == len(count_host):
        offset, row_of_token, positions = np.arange(len(count) + 1), np.arange(len(count)), start.copy()
    else:
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


def _entry_rows(rows: RowRanges, ratio: int, write_from: list[int]) -> RowRanges:
    """Return the compressed entries that this step completes, from `write_from` on; earlier entries are in the cache.

    With `ratio` 4, entry 2 is made of tokens 8 to 11, so the step that computes token 11 completes it.
    """
    first = np.array(write_from, dtype=np.int64) // ratio
    count = np.maximum(0, (rows.start + rows.count) // ratio - first)
    return row_ranges(first.tolist(), count.tolist())


def _blocks_of_rows(
    tables: BlockTables, block_size: int, block_table: NDArray[np.int32], first_block: Ints, rows: RowRanges
) -> Ints:
    """Return the block id of each row, [T], or NO_BLOCK where the sequence has no block for it."""
    batch_rows = rows.row_of_token
    columns = tables.columns(rows.positions // block_size, first_block[batch_rows])
    # The usual case: every row has a block, so no column must be masked.
    if not len(columns) or (columns.min() >= 0 and columns.max() < block_table.shape[1]):
        return block_table[batch_rows, columns].astype(np.int64)
    inside = (columns >= 0) & (columns < block_table.shape[1])
    blocks = block_table[batch_rows, np.where(inside, columns, 0)].astype(np.int64)
    blocks[~inside] = NO_BLOCK
    return blocks


def _slots(blocks: Ints, block_size: int, rows: RowRanges, write_from: list[int], dump_block: int) -> Ints:
    """Return the slot of each row, [T]: in its own block, or in the dump block if its position is below `write_from`."""
    batch_rows = rows.row_of_token
    if write_from != rows.start_host:
        blocks[rows.positions < np.array(write_from, dtype=np.int64)[batch_rows]] = dump_block
    if len(blocks) and blocks.min() == NO_BLOCK:
        token = int(np.argmax(blocks == NO_BLOCK))
        raise ValueError(
            f"Position {rows.positions[token]} of batch row {batch_rows[token]} has no block to be written to."
        )
    return blocks * block_size + rows.positions % block_size


def _logit_rows(plan: StepPlan, rows: RowRanges) -> Ints:
    """Return which of the T rows need logits, sequence by sequence, [R]."""
    if plan.logits_from == plan.start and rows.one_each:
        return rows.offset[:-1].copy()
    logits_from = np.array(plan.logits_from, dtype=np.int64)
    return np.flatnonzero(rows.positions >= logits_from[rows.row_of_token])

"""Builds the numpy arrays of the rows of a step that have KV policies: their compact tables and their masks.

A mask is two numbers for each sequence: a query reads the keys of the last `window` tokens and of the first `sinks` tokens.

Legend: B sequences of these arrays, N table columns, T query tokens of these sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transom_worker.execution.batch.block_tables import NO_BLOCK, CompactTable

Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]


@dataclass(slots=True, kw_only=True)
class PolicyArrays:
    """One group's inputs of policy rows, with the field names of `PolicyBatch`."""

    block_size: int
    block_table: Int32s  # [B, N]
    key_blocks: Int32s  # [B, N] logical block of each column
    num_columns: Int32s  # [B] columns that are used
    window: Int32s  # [B]; 0: queries read every key of the table
    sinks: Int32s  # [B]
    start: Int32s  # [B]
    count_host: list[int]  # [B]
    batch_rows: list[int]  # [B]: the plan's row of each sequence
    token_rows: Ints  # [T]: the index of each token among the step's query tokens

    @property
    def query_offset(self) -> Int32s:
        """Return the index of each sequence's first query token among the T, and T itself, [B + 1]."""
        offset = np.zeros(len(self.count_host) + 1, dtype=np.int32)
        np.cumsum(self.count_host, out=offset[1:])
        return offset


def policy_arrays(
    tables: Sequence[CompactTable],
    *,
    window: Sequence[int],
    sinks: Sequence[int],
    block_size: int,
    start: Sequence[int],
    count: Sequence[int],
    batch_rows: list[int],
    token_rows: Ints,
) -> PolicyArrays:
    """Return the arrays of rows with these tables.

    `window` and `sinks` say which keys a row's queries read, and `start` and `count` are its query tokens.
    """
    num_columns = [len(table.blocks) for table in tables]
    shape = (len(tables), max(1, *num_columns) if num_columns else 1)
    block_table, key_blocks = np.full(shape, NO_BLOCK, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    for row, table in enumerate(tables):
        block_table[row, : len(table.blocks)] = table.blocks
        key_blocks[row, : len(table.blocks)] = table.logical
    return PolicyArrays(
        block_size=block_size,
        block_table=block_table,
        key_blocks=key_blocks,
        num_columns=np.array(num_columns, dtype=np.int32),
        window=np.array(window, dtype=np.int32),
        sinks=np.array(sinks, dtype=np.int32),
        start=np.array(start, dtype=np.int32),
        count_host=list(count),
        batch_rows=batch_rows,
        token_rows=token_rows,
    )


def slots_of(table: CompactTable, block_size: int, positions: Ints, write_from: int, dump_block: int) -> Ints:
    """Return the slot (block id x block size + place in the block) at which each position's keys are written, [T].

    Positions below `write_from` are in the cache already; they go to the dump block, which no sequence owns.

    Raises:
        ValueError: the table has no block for a position that is to be written.
    """
    slots = dump_block * block_size + positions % block_size
    for logical in np.unique(positions[positions >= write_from] // block_size).tolist():
        block = table.block_of(logical)
        if block is None:
            raise ValueError(
                f"Position {logical * block_size} of a sequence with a KV policy has no block to be written to."
            )
        inside = (positions // block_size == logical) & (positions >= write_from)
        slots[inside] = block * block_size + positions[inside] % block_size
    return slots

"""Deltas applied to rows against plain lists, and the columns that a batch sees."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.how_many import num_examples
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_worker.execution.batch.block_tables import BlockTables

SIZE = 4


def spec(num_sink_blocks: int) -> GroupSpec:
    if num_sink_blocks == 0:
        return GroupSpec(name="window_9", kind=GroupKind.WINDOW, layers=(0,), block_size=SIZE, window=9)
    sinks = num_sink_blocks * SIZE - 1
    return GroupSpec(name="s", kind=GroupKind.SINKS_WINDOW, layers=(0,), block_size=SIZE, window=9, sinks=sinks)


@settings(max_examples=num_examples(daily=30, exhaustive=300))
@given(data=st.data(), num_sink_blocks=st.integers(0, 2))
def test_rows_equal_a_map_of_logical_blocks(data: st.DataObject, num_sink_blocks: int) -> None:
    tables = BlockTables(spec(num_sink_blocks), num_rows=3, num_columns=2)
    rows: list[dict[int, int]] = [{} for _ in range(3)]  # logical block -> id
    ids = iter(range(10_000))
    for _ in range(data.draw(st.integers(1, 25))):
        row = data.draw(st.integers(0, 2))
        held = rows[row]
        if data.draw(st.integers(0, 9)) == 0:
            tables.clear(row)
            held.clear()
            continue
        run = sorted(block for block in held if block >= num_sink_blocks)
        dropped = data.draw(st.integers(0, len(run)))
        for block in run[:dropped]:
            del held[block]
        skip = 0
        if len(held) >= num_sink_blocks and dropped == len(run):  # an empty run may start again further on
            skip = data.draw(st.integers(0, 3))
        first_new = max([num_sink_blocks - 1 if len(held) >= num_sink_blocks else len(held) - 1, *run]) + 1 + skip
        new = [next(ids) for _ in range(data.draw(st.integers(0, 6)))]
        held.update(zip(range(first_new, first_new + len(new)), new, strict=True))
        first = min((block for block in held if block >= num_sink_blocks), default=first_new)
        tables.apply(row, dropped=dropped, first_block=first, blocks=new)
        for block in data.draw(st.lists(st.sampled_from(sorted(held)), max_size=3)) if held else []:
            held[block] = next(ids)
            tables.move(row, logical=block, block=held[block])
        for check in range(3):
            _check(tables, check, rows[check], num_sink_blocks)


def _check(tables: BlockTables, row: int, held: dict[int, int], num_sink_blocks: int) -> None:
    logical = np.arange(max(held, default=0) + 3)
    table, first = tables.gather(np.array([row]), np.array([1000 * SIZE]))
    columns = tables.columns(logical, first.repeat(len(logical)))
    for block, column in zip(logical.tolist(), columns.tolist(), strict=True):
        found = int(table[0, column]) if 0 <= column < table.shape[1] else -1
        assert found == held.get(block, -1)
    assert int((table >= 0).sum()) == len(held)


@pytest.mark.parametrize("num_sink_blocks", [0, 1, 2])
@pytest.mark.parametrize("end", [1, 4, 5, 8, 9, 20, 21])
def test_columns_without_a_key_below_the_end_are_blank(num_sink_blocks: int, end: int) -> None:
    tables = BlockTables(spec(num_sink_blocks), num_rows=2)
    tables.apply(0, dropped=0, first_block=0, blocks=list(range(8)))
    tables.apply(1, dropped=0, first_block=0, blocks=[50])
    table, _ = tables.gather(np.array([0, 1]), np.array([end, 1]))
    needed = -(-end // SIZE)
    assert table[0].tolist() == [*range(needed), *[-1] * (table.shape[1] - needed)]
    assert table[1].tolist() == [50, *[-1] * (table.shape[1] - 1)]


def test_dropping_more_than_the_run_is_refused() -> None:
    tables = BlockTables(spec(2), num_rows=1)
    tables.apply(0, dropped=0, first_block=2, blocks=[1, 2, 3])
    with pytest.raises(ValueError, match="drops 2 blocks of a run of 1"):
        tables.apply(0, dropped=2, first_block=4, blocks=[])


def test_moving_what_is_not_there_is_refused() -> None:
    tables = BlockTables(spec(2), num_rows=1)
    tables.apply(0, dropped=0, first_block=5, blocks=[1, 2, 3, 4])  # two pinned ones, then 5 and 6
    for logical in (-1, 2, 4, 7):
        with pytest.raises(ValueError, match=f"moves logical block {logical},"):
            tables.move(0, logical=logical, block=9)
    tables.clear(0)
    with pytest.raises(ValueError, match="moves logical block 0,"):
        tables.move(0, logical=0, block=9)

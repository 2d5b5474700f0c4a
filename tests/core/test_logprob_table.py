"""`LogprobTable`: the objects that it was made of, in a tenth of their memory."""

import math
import pickle
import tracemalloc

import pytest

from transom_core.contract import Logprob, LogprobTable, TokenLogprobs

NUM_TOP = 20


def position(at: int, num_top: int = NUM_TOP) -> TokenLogprobs:
    top = tuple(Logprob(at + k, -0.5 * k, k + 1) for k in range(num_top))
    return TokenLogprobs(Logprob(at, -math.inf if at == 3 else -0.25 * at, at + 1), top)


def test_a_table_gives_back_its_positions() -> None:
    positions = [position(at) for at in range(9)]
    table = LogprobTable.of(positions)
    assert list(table) == positions
    assert (table[-1], len(table), list(table[2:5]), list(table[::4])) == (
        positions[8],
        9,
        positions[2:5],
        positions[::4],
    )
    assert pickle.loads(pickle.dumps(table)) == table != table[:8]
    whole = LogprobTable.of(positions[:4])
    whole.extend(table[4:])
    whole.extend(LogprobTable(1))
    assert whole == table
    assert LogprobTable(1) == LogprobTable(5)
    with pytest.raises(IndexError):
        table[9]


def test_positions_have_equally_many_entries() -> None:
    table = LogprobTable.of([position(0, 2)])
    with pytest.raises(ValueError, match="4 entries; those before it have 3"):
        table.append(position(1, 3))
    with pytest.raises(ValueError, match="21 entries"):
        table.extend(LogprobTable.of([position(1)]))


def test_an_entry_takes_twelve_bytes() -> None:
    [position(at) for at in range(2000)]  # so that Python's own list of unused tuples is full
    tracemalloc.start()
    try:
        table = LogprobTable.of(position(at) for at in range(2000))
        size = tracemalloc.get_traced_memory()[0]
        objects = [position(at) for at in range(2000)]
        objects_size = tracemalloc.get_traced_memory()[0] - size
    finally:
        tracemalloc.stop()
    assert len(objects) == len(table)
    assert size < 1.3 * 12 * 2000 * (1 + NUM_TOP)
    assert size < objects_size / 8

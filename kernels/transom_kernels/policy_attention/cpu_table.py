"""What the CPU kernels of `policy_attention` read of a compact block table: ranges of visible keys, and the keys' addresses.

Keys are counted in two ways. A *table index* is a key's place in the table (column * P + offset). The keys of a row's run are cut
into units by their *aligned index* = table index + shift, where the shift makes the row's own key have its position: so a row
whose run has no gap is cut where `paged_attention` would cut it, however many blocks have left the table.
"""

from __future__ import annotations

from numba import njit

from transom_kernels.cpu.simd import load_i32, load_i64
from transom_kernels.cpu.work import argument
from transom_kernels.paged_attention.cpu_arguments import BLOCK_SIZE, BLOCK_TABLE, COLUMNS, QUERY_OFFSET, START
from transom_kernels.paged_attention.cpu_walks import TableReader
from transom_kernels.policy_attention.cpu_arguments import KEY_BLOCKS, NUM_COLUMNS, SINK_Q, SINKS, WINDOWS


@njit
def row_position(arguments, sequence, row):
    """The position of a query row."""
    start = load_i32(argument(arguments, START) + 4 * sequence)
    return start + row - load_i32(argument(arguments, QUERY_OFFSET) + 4 * sequence)


@njit
def table_index(arguments, sequence, key):
    """The table index of the first key of the table that is at least `key`; the end of the table if there is none."""
    size = argument(arguments, BLOCK_SIZE)
    blocks = argument(arguments, KEY_BLOCKS) + 4 * sequence * argument(arguments, COLUMNS)
    count = load_i32(argument(arguments, NUM_COLUMNS) + 4 * sequence)
    logical, low, high = key // size, 0, count
    while low < high:
        middle = (low + high) // 2
        if load_i32(blocks + 4 * middle) < logical:
            low = middle + 1
        else:
            high = middle
    if low < count and load_i32(blocks + 4 * low) == logical:
        return low * size + key - logical * size
    return low * size


@njit
def visible_ranges(arguments, sequence, position):
    """(sinks_end, run_begin, run_end): the row sees the table indices [0, sinks_end) and [run_begin, run_end).

    Where there is a second query, the first range has all sink tokens, which it is for; else only those before the run.
    """
    window = load_i32(argument(arguments, WINDOWS) + 4 * sequence)
    sinks = load_i32(argument(arguments, SINKS) + 4 * sequence)
    run_end = table_index(arguments, sequence, position + 1)
    run_begin = table_index(arguments, sequence, max(0, position - window + 1)) if window > 0 else 0
    sinks_end = table_index(arguments, sequence, min(sinks, position + 1))
    if argument(arguments, SINK_Q) == 0:
        sinks_end = min(sinks_end, run_begin)
    return sinks_end, max(run_begin, sinks_end), run_end


def make_table(shift_at: int) -> TableReader:
    """How `paged_attention.cpu_walks` reads a compact table.

    Keys are counted by aligned index; the shift lies at the offset `shift_at` of the thread's memory.
    """

    @njit
    def index_of(memory, key):
        return key - load_i64(memory + shift_at)

    @njit
    def block_at(arguments, sequence, number):
        return load_i32(argument(arguments, BLOCK_TABLE) + 4 * (sequence * argument(arguments, COLUMNS) + number))

    return TableReader(index_of, block_at)

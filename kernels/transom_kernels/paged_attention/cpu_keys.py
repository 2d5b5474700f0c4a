"""Which keys a query row sees, for the CPU kernels of `paged_attention` (`rule.py` has the rule), and how block tables are read."""

from __future__ import annotations

from numba import njit

from transom_kernels.cpu.simd import load_i32
from transom_kernels.cpu.work import argument
from transom_kernels.paged_attention.cpu_arguments import (
    BLOCK_TABLE,
    CHUNK,
    COLUMNS,
    FIRST_BLOCK,
    NUM_SINK_BLOCKS,
    WINDOW,
)
from transom_kernels.paged_attention.cpu_walks import TableReader

MASKED = -3e38  # the score of a key that is not seen
NO_MAXIMUM = -1e30  # the maximum of no scores: above MASKED, so that a masked score weighs 0 and no NaN comes up


@njit
def first_key(arguments, position, attend_from):
    """`MaskRule.first_key`."""
    low, window, chunk = attend_from, argument(arguments, WINDOW), argument(arguments, CHUNK)
    if window > 0:
        low = max(low, position - window + 1)
    if chunk > 0:
        low = max(low, position - position % chunk)
    return low


@njit
def index_of(scratch, key):
    """See `TableReader`: keys are counted by their position."""
    return key


@njit
def block_at(arguments, sequence, number):
    """See `TableReader`: blocks are numbered by their position in the sequence.

    A block that the table lacks reads as block 0; the host has checked that there is none where it knows the numbers.
    """
    columns, num_sink_blocks = argument(arguments, COLUMNS), argument(arguments, NUM_SINK_BLOCKS)
    shift = num_sink_blocks - load_i32(argument(arguments, FIRST_BLOCK) + 4 * sequence)
    column = min(max(number if number < num_sink_blocks else number + shift, 0), columns - 1)
    return max(0, load_i32(argument(arguments, BLOCK_TABLE) + 4 * (sequence * columns + column)))


TABLE = TableReader(index_of, block_at)

"""Reads block tables in CPU kernels: which keys a query row sees, and which block of the cache holds a key.

Legend: B sequences, N table columns, P block size in tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transom_kernels.cpu.simd import load_i32
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu.arguments import AT, PAGED


class TableReader(NamedTuple):
    """Functions that read one kind of block table. Ordinary tables number keys by position, compact tables by aligned index.

    - visible(arguments, sequence, position) -> (sinks_end, run_begin, shift): the row at `position` sees the keys [0, sinks_end)
      (sink tokens) and [run_begin, position + 1) (the run).
    - set_shift(memory, shift): must be called before keys are read: with 0 for sink tokens, with `shift` for the run.
    - index_of(memory, key): the index of a key; `index // P` is the number of its block, `index % P` its place in the block.
    - block_at(arguments, sequence, number): the id in the cache of the block with this number.
    """

    visible: Any
    set_shift: Any
    index_of: Any
    block_at: Any


@helper
def first_key(arguments, sequence, position):
    """Return the first key, sink tokens aside, that the row at `position` sees, as `rule.MaskRule.first_key`."""
    low = load_i32(argument(arguments, PAGED.attend_from) + 4 * sequence)
    window, chunk = argument(arguments, PAGED.window), argument(arguments, PAGED.chunk)
    if window > 0:
        low = max(low, position - window + 1)
    if chunk > 0:
        low = max(low, position - position % chunk)
    return low


@helper
def _visible(arguments, sequence, position):
    low = first_key(arguments, sequence, position)
    return min(argument(arguments, PAGED.num_sink_tokens), position + 1, low), low, 0


@helper
def _set_shift(memory, shift):
    """Do nothing: in ordinary tables the index of a key is its position."""


@helper
def _index_of(memory, key):
    return key


@helper
def _block_at(arguments, sequence, number):
    """Return a block's id, or block 0 if the table lacks it. The host checks before if it has the tables (`_check_blocks`)."""
    columns, num_sink_blocks = argument(arguments, AT.columns), argument(arguments, PAGED.num_sink_blocks)
    shift = num_sink_blocks - load_i32(argument(arguments, PAGED.first_block) + 4 * sequence)
    column = min(max(number if number < num_sink_blocks else number + shift, 0), columns - 1)
    return max(0, load_i32(argument(arguments, AT.block_table) + 4 * (sequence * columns + column)))


TABLE = TableReader(_visible, _set_shift, _index_of, _block_at)

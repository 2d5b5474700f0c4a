"""How CPU kernels read block tables: which keys a query row sees, and in which block of the cache a key lies.

Legend: B sequences, N table columns, P block size in tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transom_kernels.cpu.simd import load_i32
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu.arguments import AT, PAGED


class TableReader(NamedTuple):
    """Functions over a kind of block table. Ordinary tables count keys by position.

    - visible(arguments, sequence, position) -> (sinks_end, run_begin, shift): the row at `position` sees the keys [0, sinks_end)
      and [run_begin, position + 1).
    - set_shift(memory, shift): say how the keys are counted that are read next: those of the run by `shift`, sink tokens by 0.
    - index_of(memory, key): the index of a key; `index // P` is the number of its block, `index % P` its place there.
    - block_at(arguments, sequence, number): the id of a block in the cache.
    """

    visible: Any
    set_shift: Any
    index_of: Any
    block_at: Any


@helper
def first_key(arguments, sequence, position):
    """`rule.MaskRule.first_key`: the first key, sink tokens aside, that the row at `position` sees."""
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
    """Nothing: positions are indices."""


@helper
def _index_of(memory, key):
    return key


@helper
def _block_at(arguments, sequence, number):
    """A block that the table lacks reads as block 0; the host has checked that there is none where it knows the numbers."""
    columns, num_sink_blocks = argument(arguments, AT.columns), argument(arguments, PAGED.num_sink_blocks)
    shift = num_sink_blocks - load_i32(argument(arguments, PAGED.first_block) + 4 * sequence)
    column = min(max(number if number < num_sink_blocks else number + shift, 0), columns - 1)
    return max(0, load_i32(argument(arguments, AT.block_table) + 4 * (sequence * columns + column)))


TABLE = TableReader(_visible, _set_shift, _index_of, _block_at)

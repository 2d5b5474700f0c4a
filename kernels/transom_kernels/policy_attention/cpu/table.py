"""The argument words of the CPU kernels of `policy_attention` that follow those that they share with `paged_attention`, and the
functions that read compact block tables: the ranges of visible keys, and the blocks of keys.

Keys are numbered in two ways. A *table index* is a key's place in the table (column * P + offset). The keys of a row's run are cut
into units by their *aligned index* = table index + shift. The shift is such that the aligned index of the row's own key is its
position. So a row whose run has no gaps is cut where `paged_attention` would cut it, however many blocks were dropped.

Legend: B sequences, N table columns, P block size in tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transom_kernels.cpu.arguments import numbers_of
from transom_kernels.cpu.simd import load_i32, load_i64, store_i64
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu.arguments import AT, AttentionArguments
from transom_kernels.paged_attention.cpu.tables import TableReader


class PolicyArguments(NamedTuple):
    """Compact block tables with their windows, all int32, and the tensor to which `add_mass` adds."""

    key_blocks: torch.Tensor  # [B, N]: logical block of each column
    num_columns: torch.Tensor  # [B]
    windows: torch.Tensor  # [B] tokens; 0: none
    sinks: torch.Tensor  # [B]: keys below this position are sink tokens
    mass: torch.Tensor | None = None  # [B, N] float32
    mass_units: int = 0  # items of `add_mass` for each sequence


POLICY = numbers_of(PolicyArguments, after=AttentionArguments)


@helper
def table_index(arguments, sequence, key):
    """Return the table index of the first key in the table that is at least `key`; the end of the table if there is none."""
    size = argument(arguments, AT.block_size)
    blocks = argument(arguments, POLICY.key_blocks) + 4 * sequence * argument(arguments, AT.columns)
    count = load_i32(argument(arguments, POLICY.num_columns) + 4 * sequence)
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


@helper
def visible_indices(arguments, sequence, position):
    """Return (sinks_end, run_begin, run_end): the row at `position` sees table indices [0, sinks_end) and [run_begin, run_end).

    With `sink_q` the first range has all sink tokens, which take that query; otherwise only those before the run.
    """
    window = load_i32(argument(arguments, POLICY.windows) + 4 * sequence)
    sinks = load_i32(argument(arguments, POLICY.sinks) + 4 * sequence)
    run_end = table_index(arguments, sequence, position + 1)
    run_begin = table_index(arguments, sequence, max(0, position - window + 1)) if window > 0 else 0
    sinks_end = table_index(arguments, sequence, min(sinks, position + 1))
    if argument(arguments, AT.sink_q) == 0:
        sinks_end = min(sinks_end, run_begin)
    return sinks_end, max(run_begin, sinks_end), run_end


@helper
def visible(arguments, sequence, position):
    """Return the ranges as aligned indices, and the shift of the run (`TableReader.visible`)."""
    sinks_end, run_begin, run_end = visible_indices(arguments, sequence, position)
    shift = position + 1 - run_end  # the row's own key, the last one, has table index run_end - 1
    return sinks_end, run_begin + shift, shift


@helper
def _block_at(arguments, sequence, number):
    columns = argument(arguments, AT.columns)
    return load_i32(argument(arguments, AT.block_table) + 4 * (sequence * columns + number))


def make_table(shift_at: int) -> TableReader:
    """Build the reader of compact tables: keys are numbered by aligned index; the shift is at `shift_at` of the thread's memory."""

    @helper
    def set_shift(memory, shift):
        store_i64(memory + shift_at, shift)

    @helper
    def index_of(memory, key):
        return key - load_i64(memory + shift_at)

    return TableReader(visible, set_shift, index_of, _block_at)

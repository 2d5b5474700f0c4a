"""The CPU kernels `attend` and `combine` of `policy_attention`: those of `paged_attention`, over compact block tables.

A prompt's tile attends twice within one softmax: to the sink tokens, with `sink_q` if it is given, then to the runs of its tokens.

Keys are numbered in two ways. A *table index* is a key's place in the table (column * P + offset). The keys of a row's run are cut
into units and key tiles, which begin at multiples of their size, by their *aligned index* = table index + *shift*. The shift is
such that the aligned index of the row's own key is its position. So a row whose run has no gaps is cut where `paged_attention`
would cut it, however many blocks were dropped. The shift of sink tokens is 0. The shift of the runs is that of the tile's first
token; all tokens of a step have the same one, since they are adjacent in the table.

Legend: B sequences, N table columns, P block size in tokens.
"""

from typing import Any, NamedTuple

import torch

from transom_kernels.cpu.arguments import numbers_of
from transom_kernels.cpu.simd import load_i32, load_i64, store_i64
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu.kernel import attend_over, combine_over, make_decode, rows_of
from transom_kernels.paged_attention.cpu.layout import (
    AT,
    AttentionArguments,
    AttentionKind,
    decode_layout,
    prompt_layout,
)
from transom_kernels.paged_attention.cpu.tables import TableReader
from transom_kernels.paged_attention.cpu.tile import make_tile


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


def make_attend_tile(kind: AttentionKind) -> Any:
    """Build attend_tile(arguments, memory, sequence, first_token, kv_head), for the tile that begins at `first_token`."""
    layout, group, tile_tokens = prompt_layout(kind), kind.group, kind.tile_tokens
    table = make_table(layout.shift)
    set_shift = table.set_shift
    begin_tile, load_queries, attend_keys, store_rows = make_tile(kind, table)

    @helper
    def attend_sinks(arguments, memory, sequence, row, position, kv_head, tokens):
        """Attend to the sink tokens."""
        end = 0
        for token in range(tokens):
            end, _, _ = visible(arguments, sequence, position + token)  # grows from token to token
            store_i64(memory + layout.low_keys + 8 * token, 0)
            store_i64(memory + layout.high_keys + 8 * token, end - 1)
        if end > 0:
            set_shift(memory, 0)
            queries = AT.sink_q if argument(arguments, AT.sink_q) else AT.q
            load_queries(arguments, memory, row, kv_head, tokens, queries)
            attend_keys(arguments, memory, sequence, kv_head, tokens, 0, 0, end)

    @helper
    def attend_runs(arguments, memory, sequence, row, position, kv_head, tokens):
        """Attend to the keys that each token sees besides sink tokens."""
        _, low, shift = visible(arguments, sequence, position)
        for token in range(tokens):
            _, run_begin, _ = visible(arguments, sequence, position + token)
            store_i64(memory + layout.low_keys + 8 * token, run_begin)
            store_i64(memory + layout.high_keys + 8 * token, position + token)
        set_shift(memory, shift)
        load_queries(arguments, memory, row, kv_head, tokens, AT.q)
        attend_keys(arguments, memory, sequence, kv_head, tokens, low, 0, position + tokens)

    @helper
    def attend_tile(arguments, memory, sequence, first_token, kv_head):
        first_row, last_row, start = rows_of(arguments, sequence)
        row, position = first_row + first_token, start + first_token
        tokens = min(tile_tokens, last_row - row)
        begin_tile(memory)
        attend_sinks(arguments, memory, sequence, row, position, kv_head, tokens)
        attend_runs(arguments, memory, sequence, row, position, kv_head, tokens)
        store_rows(arguments, memory, row, kv_head, tokens * group)

    return attend_tile


def make_attend(**parameters: Any) -> Any:
    """Build `attend`; the parameters are the fields of `AttentionKind`."""
    kind = AttentionKind(**parameters)
    return attend_over(make_attend_tile(kind), make_decode(kind, make_table(decode_layout(kind).shift)))


def make_combine(**parameters: Any) -> Any:
    """Build `combine`; the parameters are the fields of `AttentionKind`."""
    kind = AttentionKind(**parameters)
    return combine_over(kind, make_table(decode_layout(kind).shift))

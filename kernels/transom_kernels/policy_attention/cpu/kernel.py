"""The CPU kernels `attend` and `combine` of `policy_attention`: those of `paged_attention`, over compact block tables.

A prompt's tile attends twice within one softmax: to the sink tokens, with `sink_q` if it is given, then to the runs of its tokens.
Units and key tiles begin at multiples of their size, counted in aligned indices: index in the table + *shift* (`table.py`). The
shift of sink tokens is 0. The shift of the runs is that of the tile's first token; all tokens of a step have the same one, since
they are adjacent in the table.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.simd import store_i64
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu.arguments import AT
from transom_kernels.paged_attention.cpu.decode import make_decode, rows_of
from transom_kernels.paged_attention.cpu.kernel import attend_over, combine_over
from transom_kernels.paged_attention.cpu.layout import AttentionKind, decode_layout, prompt_layout
from transom_kernels.paged_attention.cpu.tile import make_tile
from transom_kernels.policy_attention.cpu.table import make_table, visible


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

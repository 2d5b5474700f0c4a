"""The CPU kernels `attend` (tiles of prompts, and rows that decode) and `combine`, for any kind of block table.

    attend:   out[t, h] = softmax(scale q[t, h] k^T) v over the keys that the row sees; q [T, H, D], out [T, H, Dv]
    combine:  merges the partial results of decoding rows whose keys several items shared

The first work items of `attend` are (tile, KV head), the others (decoding sequence, slot, KV head): a tile is some query tokens of
a prompt, and slots are items that share a row (`decode.py`). Items of `combine` are (decoding sequence, KV head). `launcher.py`
launches the kernels, and `arguments.py` has their argument words.

Legend: T query tokens, H query heads, D key width, Dv value width.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.simd import load_i32, store_i64
from transom_kernels.cpu.work import argument, each_item, helper, scratch
from transom_kernels.paged_attention.cpu.arguments import AT, PAGED, RESULT
from transom_kernels.paged_attention.cpu.decode import make_combine_rows, make_decode, rows_of
from transom_kernels.paged_attention.cpu.layout import AttentionKind, prompt_layout
from transom_kernels.paged_attention.cpu.tables import TABLE, TableReader, first_key
from transom_kernels.paged_attention.cpu.tile import make_tile


def make_attend(**parameters: Any) -> Any:
    """Build `attend` over ordinary block tables; the parameters are the fields of `AttentionKind`."""
    kind = AttentionKind(**parameters)
    return attend_over(make_attend_tile(kind), make_decode(kind, TABLE))


def make_combine(**parameters: Any) -> Any:
    """Build `combine` over ordinary block tables; the parameters are the fields of `AttentionKind`."""
    return combine_over(AttentionKind(**parameters), TABLE)


@helper
def decoding_sequence(arguments, index):
    """Return the number in the batch of the decoding sequence `index`."""
    decoding = argument(arguments, AT.work.decoding)
    return load_i32(decoding + 4 * index) if decoding else index


def attend_over(attend_tile: Any, decode: Any) -> Any:
    """Build attend(arguments, thread) from the functions that `make_attend_tile` and `make_decode` have built."""

    @each_item
    def attend(arguments, thread, item):
        kv_heads, num_tile_items = argument(arguments, RESULT.kv_heads), argument(arguments, AT.work.num_tile_items)
        kv_head = item % kv_heads
        if item < num_tile_items:
            tile = argument(arguments, AT.work.tiles) + 8 * (item // kv_heads)
            attend_tile(arguments, scratch(thread), load_i32(tile), load_i32(tile + 4), kv_head)
        else:
            index, num_slots = (item - num_tile_items) // kv_heads, argument(arguments, AT.work.num_slots)
            sequence = decoding_sequence(arguments, index // num_slots)
            decode(arguments, scratch(thread), sequence, kv_head, index % num_slots)

    return attend


def combine_over(kind: AttentionKind, table: TableReader) -> Any:
    """Build combine(arguments, thread) for a kind of block table."""
    combine_rows = make_combine_rows(kind, table)

    @each_item
    def combine(arguments, thread, item):
        kv_heads = argument(arguments, RESULT.kv_heads)
        combine_rows(arguments, decoding_sequence(arguments, item // kv_heads), item % kv_heads)

    return combine


def make_attend_tile(kind: AttentionKind) -> Any:
    """Build attend_tile(arguments, memory, sequence, first_token, kv_head), for the tile that begins at `first_token`."""
    layout, group, tile_tokens = prompt_layout(kind), kind.group, kind.tile_tokens
    begin_tile, load_queries, attend_keys, store_rows = make_tile(kind, TABLE)

    @helper
    def attend_tile(arguments, memory, sequence, first_token, kv_head):
        first_row, last_row, start = rows_of(arguments, sequence)
        row, position = first_row + first_token, start + first_token
        tokens = min(tile_tokens, last_row - row)
        for token in range(tokens):
            low = first_key(arguments, sequence, position + token)
            store_i64(memory + layout.low_keys + 8 * token, low)
            store_i64(memory + layout.high_keys + 8 * token, position + token)
        low, end = first_key(arguments, sequence, position), position + tokens
        sinks_end = min(argument(arguments, PAGED.num_sink_tokens), end)
        begin_tile(memory)
        load_queries(arguments, memory, row, kv_head, tokens, AT.q)
        attend_keys(arguments, memory, sequence, kv_head, tokens, low, sinks_end, end)
        store_rows(arguments, memory, row, kv_head, tokens * group)

    return attend_tile

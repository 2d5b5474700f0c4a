"""Prompts over ordinary block tables: finds the keys that the tokens of a tile see. `tile.py` computes the tile."""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.simd import store_i64
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu.arguments import AT, PAGED
from transom_kernels.paged_attention.cpu.decode import rows_of
from transom_kernels.paged_attention.cpu.layout import AttentionKind, prompt_layout
from transom_kernels.paged_attention.cpu.tables import TABLE, first_key
from transom_kernels.paged_attention.cpu.tile import make_tile


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

"""Prompts for the CPU kernel of `paged_attention`: which keys the tokens of a tile see (`cpu_tile.py` computes it)."""

from __future__ import annotations

from typing import Any

from numba import njit

from transom_kernels.cpu.simd import load_i32, store_i64
from transom_kernels.cpu.work import argument
from transom_kernels.paged_attention.cpu_arguments import ATTEND_FROM, NUM_SINK_TOKENS, QUERY_OFFSET, START, Q
from transom_kernels.paged_attention.cpu_keys import TABLE, first_key
from transom_kernels.paged_attention.cpu_layout import PromptLayout
from transom_kernels.paged_attention.cpu_tile import make_tile


def make_prompt(
    group: int,
    width: int,
    value_width: int,
    dtype: str,
    has_soft_cap: bool,
    sink_dtype: str | None,
    stored: str | None = None,
) -> Any:
    """attend_tile(arguments, scratch, sequence, first_token, kv_head)."""
    layout = PromptLayout(dtype, group, width, value_width)
    tokens_of_tile, low_keys_at, high_keys_at = layout.tokens, layout.low_keys, layout.high_keys
    begin_tile, load_queries, attend_keys, store_rows = make_tile(
        group, width, value_width, dtype, has_soft_cap, sink_dtype, stored, TABLE
    )

    @njit
    def attend_tile(arguments, scratch, sequence, first_token, kv_head):
        """One tile of query tokens."""
        offsets = argument(arguments, QUERY_OFFSET) + 4 * sequence
        row = load_i32(offsets) + first_token
        tokens = min(tokens_of_tile, load_i32(offsets + 4) - row)
        position = load_i32(argument(arguments, START) + 4 * sequence) + first_token
        attend_from = load_i32(argument(arguments, ATTEND_FROM) + 4 * sequence)
        for token in range(tokens):
            store_i64(scratch + low_keys_at + 8 * token, first_key(arguments, position + token, attend_from))
            store_i64(scratch + high_keys_at + 8 * token, position + token)
        end = position + tokens
        low = first_key(arguments, position, attend_from)
        sinks_end = min(argument(arguments, NUM_SINK_TOKENS), end)
        begin_tile(scratch)
        load_queries(arguments, scratch, row, kv_head, tokens, Q)
        attend_keys(arguments, scratch, sequence, kv_head, tokens, low, sinks_end, end)
        store_rows(arguments, scratch, row, kv_head, tokens * group)

    return attend_tile

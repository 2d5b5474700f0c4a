"""Prompts for the CPU kernels of `policy_attention`: the tiles of `paged_attention.cpu_tile` over a compact block table.

A tile attends twice with one softmax: to the sink tokens, with the second query where there is one, then to the runs of its tokens.
Both are cut into key tiles by aligned index (`cpu_table.py`), of which the shift is 0 for sink tokens, and for the runs that of the
tile's first token. The tokens of a step are adjacent in the table, so all have that shift.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from transom_kernels.cpu.simd import lane_sum, load_f32, load_i32, load_i64, load_scalar_f32, store_i64
from transom_kernels.cpu.work import argument
from transom_kernels.paged_attention.cpu_arguments import KV_HEADS, QUERY_OFFSET, Q
from transom_kernels.paged_attention.cpu_layout import PromptLayout
from transom_kernels.paged_attention.cpu_tile import make_tile
from transom_kernels.policy_attention.cpu_arguments import SINK_Q
from transom_kernels.policy_attention.cpu_statistics import make_store_statistics
from transom_kernels.policy_attention.cpu_table import make_table, row_position, visible_ranges


def make_prompt(
    group: int,
    width: int,
    value_width: int,
    dtype: str,
    has_soft_cap: bool,
    sink_dtype: str | None,
    stored: str,
) -> Any:
    """attend_tile(arguments, memory, sequence, first_token, kv_head); it takes a word behind `PromptLayout`, the shift."""
    layout = PromptLayout(dtype, group, width, value_width)
    shift_at, tokens_of_tile = layout.num_bytes, layout.tokens
    low_keys_at, high_keys_at, maxima_at, sums_at = layout.low_keys, layout.high_keys, layout.maxima, layout.sums
    begin_tile, load_queries, attend_keys, store_rows = make_tile(
        group,
        width,
        value_width,
        dtype,
        has_soft_cap,
        sink_dtype,
        stored,
        make_table(shift_at),
    )
    store_statistics = make_store_statistics(sink_dtype)

    @njit
    def attend_sinks(arguments, memory, sequence, row, kv_head, tokens):
        """Attend to the sink tokens."""
        end = 0
        for token in range(tokens):
            position = row_position(arguments, sequence, row + token)
            end = visible_ranges(arguments, sequence, position)[0]  # ascends with the token
            store_i64(memory + low_keys_at + 8 * token, 0)
            store_i64(memory + high_keys_at + 8 * token, end - 1)
        if end > 0:
            store_i64(memory + shift_at, 0)
            load_queries(arguments, memory, row, kv_head, tokens, SINK_Q if argument(arguments, SINK_Q) else Q)
            attend_keys(arguments, memory, sequence, kv_head, tokens, 0, 0, end)

    @njit
    def attend_runs(arguments, memory, sequence, row, kv_head, tokens):
        """Attend to what each token sees besides."""
        shift, end = 0, 0
        for token in range(tokens):
            position = row_position(arguments, sequence, row + token)
            _, run_begin, run_end = visible_ranges(arguments, sequence, position)
            if token == 0:
                shift = position + 1 - run_end
            end = run_end + shift
            store_i64(memory + low_keys_at + 8 * token, run_begin + shift)
            store_i64(memory + high_keys_at + 8 * token, end - 1)
        store_i64(memory + shift_at, shift)
        load_queries(arguments, memory, row, kv_head, tokens, Q)
        attend_keys(arguments, memory, sequence, kv_head, tokens, load_i64(memory + low_keys_at), 0, end)

    @njit
    def attend_tile(arguments, memory, sequence, first_token, kv_head):
        """One tile of query tokens."""
        offsets = argument(arguments, QUERY_OFFSET) + 4 * sequence
        row = load_i32(offsets) + first_token
        tokens = min(tokens_of_tile, load_i32(offsets + 4) - row)
        begin_tile(memory)
        attend_sinks(arguments, memory, sequence, row, kv_head, tokens)
        attend_runs(arguments, memory, sequence, row, kv_head, tokens)
        store_rows(arguments, memory, row, kv_head, tokens * group)
        heads = argument(arguments, KV_HEADS) * group
        for r in range(tokens * group):
            top, total = load_scalar_f32(memory + maxima_at + 4 * r), lane_sum(load_f32(memory + sums_at + 64 * r))
            store_statistics(arguments, row + r // group, kv_head * group + r % group, top, total, heads)

    return attend_tile

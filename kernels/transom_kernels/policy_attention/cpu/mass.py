"""The CPU kernel `add_mass`: adds the attention probabilities of each block's keys to `mass` [B, N] float32.

    mass[b, n] += 2 ** (score - maximum) / sum, summed over the keys of column n and all rows and heads of sequence b

Scores are computed again; `attend` has stored each row's maximum and sum as statistics. A work item is a unit of 256 table indices
of one sequence.

Legend: B sequences, N table columns.
"""

from typing import Any

import numpy as np

from transom_kernels.cpu.simd import (
    LOG2_E,
    exp2,
    float_of_bits,
    load_f32,
    load_i32,
    load_scalar_f32,
    splat,
    store_f32,
    store_scalar_f32,
    tanh,
)
from transom_kernels.cpu.work import argument, each_item, helper, scratch
from transom_kernels.paged_attention.cpu.decode_loops import make_group_scores
from transom_kernels.paged_attention.cpu.kernel import rows_of
from transom_kernels.paged_attention.cpu.layout import AT, MASKED, RESULT, UNIT_KEYS, AttentionKind, decode_layout
from transom_kernels.paged_attention.cpu.row_vectors import keep_visible
from transom_kernels.paged_attention.cpu.tables import clear_floats, make_find_groups, make_write_scales
from transom_kernels.paged_attention.cpu.units import make_load_queries
from transom_kernels.policy_attention.cpu.kernel import POLICY, make_table, visible_indices


def make_add_mass(**parameters: Any) -> Any:
    """Build `add_mass`; the parameters are the fields of `AttentionKind`. Values are not read: those of keys stand in."""
    kind = AttentionKind(**parameters)
    layout, group, has_scales, has_soft_cap = decode_layout(kind), kind.group, kind.has_scales, kind.has_soft_cap
    table = make_table(layout.shift)
    find_groups = make_find_groups(kind, table, layout.key_copies, layout.value_copies)
    write_scales, set_shift = make_write_scales(table), table.set_shift
    group_scores = make_group_scores(
        kind.cached, group, kind.width, kind.width, (layout.query_stride, layout.score_stride)
    )
    load_queries = make_load_queries(kind, as_integers=False)
    masked, log2_e, zero, one = np.float32(MASKED), np.float32(LOG2_E), np.float32(0.0), np.float32(1.0)

    @helper
    def add_head(scores, key_scales, sums, begin, end, top, inverse, factor, soft_cap):
        """Add one head's probabilities of the keys [begin, end) to the sums."""
        first = begin // 16 * 16
        for key in range(first, end, 16):
            x = load_f32(scores + 4 * (key - first)) * splat(factor)
            if has_scales:
                x = x * load_f32(key_scales + 4 * (key - first))
            if has_soft_cap:
                x = tanh(x) * splat(soft_cap * log2_e)
            x = keep_visible(x, key, begin, end - 1, key, masked)
            at = sums + 4 * (key - first // UNIT_KEYS * UNIT_KEYS)
            store_f32(at, load_f32(at) + exp2(x - splat(top)) * splat(inverse))

    @helper
    def add_range(arguments, memory, sequence, row, kv_head, begin, end, tensor):
        """Add the probabilities of a row's heads for the table indices [begin, end), with the queries of argument `tensor`."""
        if begin >= end:
            return
        load_queries(arguments, memory, row, kv_head, tensor)
        keys, values = memory + layout.key_groups, memory + layout.value_groups
        find_groups(arguments, memory, sequence, kv_head, begin, end, keys, values)
        num_groups = (end - begin // 16 * 16 + 15) // 16
        key_scales, value_scales = memory + layout.key_scales, memory + layout.value_scales
        if has_scales:
            clear_floats(key_scales, 16 * num_groups)
            at = 4 * (begin - begin // 16 * 16)
            write_scales(arguments, memory, sequence, kv_head, begin, end, key_scales + at, value_scales + at)
        group_scores(keys, values, num_groups, memory + layout.queries, memory + layout.scores)
        scale, soft_cap = (
            float_of_bits(argument(arguments, RESULT.scale)),
            float_of_bits(argument(arguments, RESULT.soft_cap)),
        )
        factor = scale / soft_cap if has_soft_cap else scale * log2_e
        statistics = argument(arguments, RESULT.statistics)
        statistics += 8 * (row * argument(arguments, RESULT.kv_heads) + kv_head) * group
        for g in range(group):
            top, weight_sum = load_scalar_f32(statistics + 8 * g), load_scalar_f32(statistics + 8 * g + 4)
            inverse = one / weight_sum if weight_sum > zero else zero
            scores = memory + layout.scores + g * layout.score_stride
            add_head(scores, key_scales, memory + layout.sums, begin, end, top, inverse, factor, soft_cap)

    @helper
    def add_unit(arguments, memory, sequence, unit):
        size, columns = argument(arguments, AT.block_size), argument(arguments, AT.columns)
        unit_begin, unit_end = unit * UNIT_KEYS, (unit + 1) * UNIT_KEYS
        num_indices = load_i32(argument(arguments, POLICY.num_columns) + 4 * sequence) * size
        for at in range(0, 4 * UNIT_KEYS, 64):
            store_f32(memory + layout.sums + at, splat(zero))
        set_shift(memory, 0)
        sink_queries = AT.sink_q if argument(arguments, AT.sink_q) else AT.q
        if unit_begin >= num_indices:
            return
        first, last, start = rows_of(arguments, sequence)
        for row in range(first, last):
            sinks_end, run_begin, run_end = visible_indices(arguments, sequence, start + row - first)
            for kv_head in range(argument(arguments, RESULT.kv_heads)):
                end = min(unit_end, sinks_end)
                add_range(arguments, memory, sequence, row, kv_head, unit_begin, end, sink_queries)
                begin, end = max(unit_begin, run_begin), min(unit_end, run_end)
                add_range(arguments, memory, sequence, row, kv_head, begin, end, AT.q)
        for index in range(unit_begin, min(unit_end, num_indices)):
            at = argument(arguments, POLICY.mass) + 4 * (sequence * columns + index // size)
            store_scalar_f32(at, load_scalar_f32(at) + load_scalar_f32(memory + layout.sums + 4 * (index - unit_begin)))

    @each_item
    def add_mass(arguments, thread, item):
        units = argument(arguments, POLICY.mass_units)
        add_unit(arguments, scratch(thread), item // units, item % units)

    return add_mass

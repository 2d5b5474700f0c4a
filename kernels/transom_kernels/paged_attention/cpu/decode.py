"""Decoding on CPUs: attention of one query row and one KV head at a time, which reads the blocks of the KV cache in place.

- A row sees the keys [0, sinks_end) of the *sink tokens* (the first tokens of a sequence, which a sliding window does not hide) and
  the *run* [run_begin, position + 1), which ends with its own key; `tables.TableReader` finds both ranges.
- unit: the keys of one of these two ranges that lie between two multiples of UNIT_KEYS.
- partial result: a unit's attention, for each query head of the KV head (`row_results.py`).
- slot: one of S work items that share a row and KV head. Slot s computes the units s, s + S, ...

Partial results are merged in the order of their keys: by the item that computed them or, if slots share a row, by a second launch.
Both do the same operations, so the result does not depend on the number of slots.

Example: without a window, the row at position 600 has the units [0, 256), [256, 512) and [512, 601). With two slots the first
computes the units 0 and 2, the second unit 1.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.simd import load_i32
from transom_kernels.cpu.work import argument, helper
from transom_kernels.paged_attention.cpu.arguments import AT, RESULT
from transom_kernels.paged_attention.cpu.layout import UNIT_KEYS, AttentionKind, decode_layout
from transom_kernels.paged_attention.cpu.row_results import make_partial_results
from transom_kernels.paged_attention.cpu.tables import TableReader, make_find_groups, make_write_scales
from transom_kernels.paged_attention.cpu.units import integer_words, make_attend_unit, make_load_queries


@helper
def count_units(sinks_end, run_begin, position):
    """Return the number of units of the sink tokens, and of all units."""
    num_sink_units = (sinks_end + UNIT_KEYS - 1) // UNIT_KEYS
    run = position // UNIT_KEYS + 1 - run_begin // UNIT_KEYS if run_begin <= position else 0
    return num_sink_units, num_sink_units + run


@helper
def unit_range(sinks_end, run_begin, position, num_sink_units, unit):
    """Return the keys [begin, end) of a unit."""
    if unit < num_sink_units:
        return unit * UNIT_KEYS, min((unit + 1) * UNIT_KEYS, sinks_end)
    number = run_begin // UNIT_KEYS + unit - num_sink_units
    return max(run_begin, number * UNIT_KEYS), min((number + 1) * UNIT_KEYS, position + 1)


@helper
def rows_of(arguments, sequence):
    """Return the query rows [first, last) of a sequence, and the position of the first."""
    offsets = argument(arguments, AT.query_offset) + 4 * sequence
    return load_i32(offsets), load_i32(offsets + 4), load_i32(argument(arguments, AT.start) + 4 * sequence)


def _make_partials_of(kind: AttentionKind) -> Any:
    """Build partials_of(arguments, row, kv_head), the address of the partial results that slots store for a row and KV head."""
    partial_bytes = kind.partial_bytes

    @helper
    def partials_of(arguments, row, kv_head):
        place = (row * argument(arguments, RESULT.kv_heads) + kv_head) * argument(arguments, AT.work.max_units)
        return argument(arguments, AT.work.partials) + place * partial_bytes

    return partials_of


def make_decode(kind: AttentionKind, table: TableReader) -> Any:
    """Build decode(arguments, memory, sequence, kv_head, slot), which computes this slot's units of a sequence's query rows."""
    layout, partial_bytes = decode_layout(kind), kind.partial_bytes
    visible, set_shift = table.visible, table.set_shift
    find_groups = make_find_groups(kind, table, layout.key_copies, layout.value_copies)
    attend_unit = make_attend_unit(kind, find_groups, make_write_scales(table))
    merge, clear, store = make_partial_results(kind)
    load_queries = make_load_queries(kind, as_integers=integer_words(kind) is not None)
    partials_of = _make_partials_of(kind)

    @helper
    def attend_row(arguments, memory, sequence, kv_head, slot, row, position):
        sinks_end, run_begin, shift = visible(arguments, sequence, position)
        num_sink_units, num_units = count_units(sinks_end, run_begin, position)
        num_slots = argument(arguments, AT.work.num_slots)
        shared = num_slots > 1 and num_units > 1
        if slot > 0 and (slot >= num_units or not shared):  # no unit is left for this slot
            return
        partials, total, partial = partials_of(arguments, row, kv_head), memory + layout.total, memory + layout.partial
        if num_units == 0:  # the row sees no key
            clear(total)
        loaded: Any = -1  # number of the argument whose queries are in memory
        for unit in range(slot, num_units, num_slots if shared else 1):
            is_sink = unit < num_sink_units
            wanted = AT.sink_q if is_sink and argument(arguments, AT.sink_q) else AT.q
            if loaded != wanted:
                load_queries(arguments, memory, row, kv_head, wanted)
                loaded = wanted
            set_shift(memory, 0 if is_sink else shift)
            begin, end = unit_range(sinks_end, run_begin, position, num_sink_units, unit)
            # shared rows: into the unit's own place, for `combine_rows`; otherwise merged into `total`, which begins as unit 0
            to = partials + unit * partial_bytes if shared else (partial if unit > 0 else total)
            attend_unit(arguments, memory, sequence, kv_head, begin, end, to)
            if not shared and unit > 0:
                merge(total, partial)
        if not shared:
            store(arguments, row, kv_head, total)

    @helper
    def decode(arguments, memory, sequence, kv_head, slot):
        first, last, start = rows_of(arguments, sequence)
        for row in range(first, last):
            attend_row(arguments, memory, sequence, kv_head, slot, row, start + row - first)

    return decode


def make_combine_rows(kind: AttentionKind, table: TableReader) -> Any:
    """Build combine_rows(arguments, sequence, kv_head): merge the partial results of those rows that slots have shared."""
    partial_bytes, visible, partials_of = kind.partial_bytes, table.visible, _make_partials_of(kind)
    merge, _, store = make_partial_results(kind)

    @helper
    def combine_rows(arguments, sequence, kv_head):
        first, last, start = rows_of(arguments, sequence)
        for row in range(first, last):
            sinks_end, run_begin, _ = visible(arguments, sequence, start + row - first)
            _, num_units = count_units(sinks_end, run_begin, start + row - first)
            if num_units > 1:
                partials = partials_of(arguments, row, kv_head)
                for unit in range(1, num_units):
                    merge(partials, partials + unit * partial_bytes)
                store(arguments, row, kv_head, partials)

    return combine_rows

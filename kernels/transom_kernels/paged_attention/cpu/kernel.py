"""The CPU kernels `attend` (tiles of prompts, and rows that decode) and `combine`, for any kind of block table.

    attend:   out[t, h] = softmax(scale q[t, h] k^T) v over the keys that the row sees; q [T, H, D], out [T, H, Dv]
    combine:  merges the partial results of decoding rows whose keys several items shared

The first work items of `attend` are (tile, KV head), the others (decoding sequence, slot, KV head): a tile is some query tokens of
a prompt (`tile.py`). Items of `combine` are (decoding sequence, KV head). `launcher.py` launches the kernels, and `layout.py` has
their argument words.

*Decoding* attends with one query row and one KV head at a time, and reads the blocks of the KV cache in place:

- A row sees the keys [0, sinks_end) of the *sink tokens* (the first tokens of a sequence, which a sliding window does not hide) and
  the *run* [run_begin, position + 1), which ends with its own key; `tables.TableReader` finds both ranges.
- unit: the keys of one of these two ranges that lie between two multiples of UNIT_KEYS.
- partial result: a unit's attention, for each query head of the KV head (`row_results.py`).
- slot: one of S work items that share a row and KV head. Slot s computes the units s, s + S, ...

Partial results are merged in the order of their keys: by the item that computed them or, if slots share a row, by `combine`. Both
do the same operations, so the result does not depend on the number of slots.

Example: without a window, the row at position 600 has the units [0, 256), [256, 512) and [512, 601). With two slots the first
computes the units 0 and 2, the second unit 1.

Legend: T query tokens, H query heads, D key width, Dv value width.
"""

from typing import Any

from transom_kernels.cpu.simd import load_i32, store_i64
from transom_kernels.cpu.work import argument, each_item, helper, scratch
from transom_kernels.paged_attention.cpu.layout import (
    AT,
    PAGED,
    RESULT,
    UNIT_KEYS,
    AttentionKind,
    decode_layout,
    prompt_layout,
)
from transom_kernels.paged_attention.cpu.row_results import make_partial_results
from transom_kernels.paged_attention.cpu.tables import (
    TABLE,
    TableReader,
    first_key,
    make_find_groups,
    make_next_groups,
    make_write_scales,
)
from transom_kernels.paged_attention.cpu.tile import make_tile
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
    attend_unit = make_attend_unit(kind, find_groups, make_write_scales(table), prefetches_next=True)
    next_groups = make_next_groups(table)
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
            following = unit + (num_slots if shared else 1)
            if following >= num_units or (following < num_sink_units) != is_sink:
                following = (
                    unit  # this unit's own keys, which are in the cache already: the next ones are not known yet
                )
            begin_next, end_next = unit_range(sinks_end, run_begin, position, num_sink_units, following)
            next_groups(arguments, memory, sequence, kv_head, begin_next, end_next, memory + layout.next_keys)
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

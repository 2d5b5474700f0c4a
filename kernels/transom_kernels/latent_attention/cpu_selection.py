"""`select_rows` on CPUs: two kernels. `score` scores the rows that queries see, `choose` lists the slots of the best ones.

    scores[t, n] = sum_h head_weights[t, h] * relu(q[t, h] . key[n])

A work item of `score` has some of a query's units (256 keys, as decoding rows have); one of `choose` has a query. The least score
that is chosen is found by bisection over the floats' sort keys, so nothing is sorted, and slots come in the order of positions. A
query that sees no more than K rows reads all of them without scores.

Legend: T queries, H heads, X width of a key, N rows of a block table, B sequences, K slots of a query, P rows per block.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from transom_kernels.cpu.arguments import RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import empty, launch
from transom_kernels.cpu.rows import count_from, kth_largest, next_float
from transom_kernels.cpu.simd import (
    LOAD_SCALAR,
    NUM_BYTES,
    fma,
    keep_part,
    lanes_at_least,
    lanes_greater,
    load_f32,
    load_i32,
    lowest_bit,
    splat,
    store_f32,
    store_i64,
    vector_max,
)
from transom_kernels.cpu.work import argument, each_item, helper, row_address, scratch, sequence_of
from transom_kernels.paged_attention.cpu.decode_loops import make_group_scores
from transom_kernels.paged_attention.cpu.launcher import attention_arguments, kind_of, num_slots_for
from transom_kernels.paged_attention.cpu.layout import (
    AT,
    UNIT_KEYS,
    AttentionArguments,
    AttentionKind,
    PagedArguments,
    WorkArguments,
    decode_layout,
)
from transom_kernels.paged_attention.cpu.tables import TABLE, make_find_groups
from transom_kernels.paged_attention.cpu.units import make_load_queries
from transom_kernels.paged_attention.inputs import PagedBatch, PagedInputs

MAX_SCORE_BYTES = 64 << 20  # of the scores of the queries that are computed at once, if these are several


class SelectArguments(NamedTuple):
    """The argument words after `AttentionArguments`."""

    paged: PagedArguments
    head_weights: RowArguments  # [T, H]
    # [queries at once, N rounded up to UNIT_KEYS] float32; None: every query reads all rows
    scores: torch.Tensor | None
    out: torch.Tensor  # [T, K] int64, contiguous
    first_row: int  # of the queries that are computed now
    num_sequences: int
    num_rows: int  # N
    top_k: int  # K
    num_slots: int  # items of a query


OWN = numbers_of(SelectArguments, after=AttentionArguments)


def select_rows_cpu(
    q: torch.Tensor, head_weights: torch.Tensor, key_cache: torch.Tensor, batch: PagedBatch, *, top_k: int
) -> torch.Tensor:
    """Return the slots [T, min(top_k, N)] of the best rows of `key_cache` [ids, P, 1, X] that each query of `q` [T, H, X] sees."""
    tokens, num_rows = len(q), batch.block_table.shape[1] * batch.block_size
    out = empty((tokens, min(top_k, num_rows)), torch.int64)
    inputs = PagedInputs(q=q, k_cache=key_cache, v_cache=key_cache, batch=batch, scale=1.0)
    kind, units = kind_of(inputs), -(-num_rows // UNIT_KEYS)
    at_once = max(1, min(tokens, MAX_SCORE_BYTES // (4 * units * UNIT_KEYS)))
    has_scores = num_rows > out.shape[1]
    scores = empty((at_once, units * UNIT_KEYS), torch.float32) if has_scores else None
    module = "transom_kernels.latent_attention.cpu_selection"
    for first in range(0, tokens if out.shape[1] else 0, at_once):
        count = min(at_once, tokens - first)
        own = SelectArguments(
            paged=PagedArguments(batch.first_block, batch.attend_from, batch.num_sink_blocks, 0, 0, 0),
            head_weights=RowArguments.of(head_weights),
            scores=scores,
            out=out,
            first_row=first,
            num_sequences=len(batch.start),
            num_rows=num_rows,
            top_k=out.shape[1],
            num_slots=num_slots_for(count, units + 2, 0),
        )
        work = attention_arguments(inputs, WorkArguments(), out=None, sink_q=None, statistics=None)
        if has_scores:
            kernel = cpu_kernel(module, "make_score", **kind._asdict())
            launch(kernel, count * own.num_slots, (work, own), scratch_bytes=decode_layout(kind).num_bytes)
        launch(cpu_kernel(module, "make_choose"), count, (work, own))
    return out


@helper
def _sequence_and_visible(arguments, row):
    """Return the sequence of a query, and how many rows it sees; none if it is padding, which belongs to no sequence."""
    num_sequences, offsets = argument(arguments, OWN.num_sequences), argument(arguments, AT.query_offset)
    sequence = sequence_of(offsets, num_sequences, row)
    if sequence >= num_sequences:
        return sequence, 0
    position = load_i32(argument(arguments, AT.start) + 4 * sequence) + row - load_i32(offsets + 4 * sequence)
    return sequence, min(position + 1, argument(arguments, OWN.num_rows))


@helper
def _scores_of(arguments, row):
    """Return the address of a query's scores."""
    stride = (argument(arguments, OWN.num_rows) + UNIT_KEYS - 1) // UNIT_KEYS * UNIT_KEYS * 4
    return argument(arguments, OWN.scores) + (row - argument(arguments, OWN.first_row)) * stride


def make_score(**parameters: Any) -> Any:
    """Build the kernel `score`; the parameters are the fields of the `AttentionKind` of the indexer's queries."""
    kind = AttentionKind(**parameters)
    layout, heads = decode_layout(kind), kind.group
    load_queries = make_load_queries(kind, as_integers=False)
    find_groups = make_find_groups(kind, TABLE, layout.key_copies, layout.value_copies)
    strides = (layout.query_stride, layout.score_stride)
    group_scores = make_group_scores(kind.cached, heads, kind.width, kind.width, strides)
    load_weight, weight_bytes, zero = LOAD_SCALAR[kind.dtype], NUM_BYTES[kind.dtype], np.float32(0.0)

    @helper
    def score_unit(arguments, memory, row, sequence, begin, end):
        """Score the keys [begin, end) of a unit."""
        keys, values, products = memory + layout.key_groups, memory + layout.value_groups, memory + layout.scores
        find_groups(arguments, memory, sequence, 0, begin, end, keys, values)
        group_scores(keys, values, (end - begin + 15) // 16, memory + layout.queries, products)
        weights, out = row_address(arguments, OWN.head_weights, row), _scores_of(arguments, row) + 4 * begin
        for at in range(0, 4 * (end - begin), 64):
            total = splat(zero)
            for h in range(heads):
                product = vector_max(load_f32(products + h * layout.score_stride + at), splat(zero))
                total = fma(splat(load_weight(weights + h * weight_bytes)), product, total)
            store_f32(out + at, total)

    @each_item
    def score(arguments, thread, item):
        num_slots, memory = argument(arguments, OWN.num_slots), scratch(thread)
        row, slot = argument(arguments, OWN.first_row) + item // num_slots, item % num_slots
        sequence, visible = _sequence_and_visible(arguments, row)
        if visible > argument(arguments, OWN.top_k) and slot * UNIT_KEYS < visible:
            load_queries(arguments, memory, row, 0, AT.q)
            for begin in range(slot * UNIT_KEYS, visible, num_slots * UNIT_KEYS):
                score_unit(arguments, memory, row, sequence, begin, min(begin + UNIT_KEYS, visible))

    return score


def make_choose() -> Any:
    """Build the kernel `choose`."""
    block_at = TABLE.block_at

    @helper
    def append(arguments, sequence, number, out, count):
        """Store the slot of a row; return the number of slots."""
        size = argument(arguments, AT.block_size)
        store_i64(out + 8 * count, block_at(arguments, sequence, number // size) * size + number % size)
        return count + 1

    @each_item
    def choose(arguments, thread, item):
        row, top_k = argument(arguments, OWN.first_row) + item, argument(arguments, OWN.top_k)
        sequence, visible = _sequence_and_visible(arguments, row)
        out, count = argument(arguments, OWN.out) + 8 * top_k * row, 0
        if visible <= top_k:
            for n in range(visible):
                count = append(arguments, sequence, n, out, count)
        else:
            scores = _scores_of(arguments, row)
            end = visible // 16 * 16
            if end < visible:
                store_f32(scores + 4 * end, keep_part(load_f32(scores + 4 * end), visible - end, -math.inf))
            least = kth_largest(scores, visible, top_k, -math.inf, math.inf)
            rest = top_k - count_from(scores, visible, next_float(least))  # of equal scores the first ones
            for n in range(0, visible, 16):
                x = load_f32(scores + 4 * n)
                above = lanes_greater(x, splat(least))
                mask = lanes_at_least(x, splat(least))
                while mask != 0:
                    bit = lowest_bit(mask)
                    mask &= mask - 1
                    is_above = (above >> bit) & 1
                    if is_above == 1 or (rest > 0 and n + bit < visible):
                        rest -= 1 - is_above
                        count = append(arguments, sequence, n + bit, out, count)
        for n in range(count, top_k):
            store_i64(out + 8 * n, -1)

    return choose

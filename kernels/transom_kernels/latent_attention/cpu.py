"""`latent_attention` on CPUs: the kernel `attend` and its launch. A work item is a group of heads of one query.

    out[t, h] = softmax over rows r of (scale * q[t, h] . r, sink_logits[h]) times r       rows of the window, then entries

A row is both key and value of all heads. The window's rows are those of the latest tokens; an *entry* is a row that was pooled from
several tokens (`op.py`). An item first lists the addresses of the query's rows, and skips negative slots. Then it attends to the
listed rows as `paged_attention` does to the keys of a decoding row: in units of 256, whose partial results it merges.

Legend: T queries, H heads, D latent width, W rows of the window, K entries, P rows per block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from transom_kernels.cpu.arguments import numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.simd import NUM_BYTES, load_i64, splat, store_f32, store_i64
from transom_kernels.cpu.work import argument, each_item, helper, scratch
from transom_kernels.latent_attention.reference import LatentInputs
from transom_kernels.paged_attention.cpu.layout import RESULT, UNIT_KEYS, AttentionKind, ResultArguments, decode_layout
from transom_kernels.paged_attention.cpu.row_results import make_partial_results
from transom_kernels.paged_attention.cpu.row_vectors import make_copy_row, make_move_row
from transom_kernels.paged_attention.cpu.units import make_attend_unit

_MAX_HEADS = 32  # most heads of a work item; rows that are not adjacent in the cache are copied once for all of them


class RowsArguments(NamedTuple):
    """The argument words of the rows that queries read: those of the window, or the entries. Strides are in bytes."""

    cache: torch.Tensor | None = None  # [ids, P, 1, D]
    slots: torch.Tensor | None = None  # [T, W] or [T, K] int64; negative: absent
    num_slots: int = 0  # W or K
    slot_row: int = 0  # stride from a query's slots to the next query's
    block_rows: int = 1  # P
    block: int = 0
    row: int = 0

    @classmethod
    def of(cls, cache: torch.Tensor | None, slots: torch.Tensor | None) -> RowsArguments:
        """Return the words of a cache and its slots; without a cache, words with no slots."""
        if cache is None or slots is None:
            return cls()
        block, row = (stride * cache.element_size() for stride in cache.stride()[:2])
        return cls(cache, slots, slots.shape[1], slots.stride(0) * slots.element_size(), cache.shape[1], block, row)


class LatentArguments(NamedTuple):
    """The argument words after `ResultArguments`, in which `kv_heads` is the number of groups of heads here."""

    q: torch.Tensor  # [T, H, D]
    q_row: int  # bytes
    q_head: int
    window: RowsArguments
    entries: RowsArguments


LATENT = numbers_of(LatentArguments, after=ResultArguments)


def fits_cpu_kernel(inputs: LatentInputs) -> bool:
    """Return whether the kernel supports these tensors: the elements of a row, and the slots of a query, must be adjacent."""
    tensors = [inputs.q, *(tensor for place in inputs.places for tensor in place)]
    return inputs.q.dtype in DTYPES and all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)


def latent_attention_cpu(inputs: LatentInputs) -> torch.Tensor:
    """Return attention [T, H, D] of `q` [T, H, D]: softmax of (scale q . r over a query's rows r, and sink_logits) times r.

    Caches are [ids, P, 1, D]. The slots [T, W] and [T, K] name each query's rows; negative slots name none.
    """
    q, sinks = inputs.q, inputs.sink_logits
    rows, heads, width = q.shape
    out = empty((rows, heads, width), q.dtype)
    # groups of heads must be equally large
    heads_at_once = max(count for count in range(1, _MAX_HEADS + 1) if heads % count == 0)
    dtype, size = DTYPES[q.dtype], q.element_size()
    kind = AttentionKind(
        dtype=dtype, stored=dtype, group=heads_at_once, width=width, value_width=width, sink_dtype="f32"
    )
    result = ResultArguments(
        out=out,
        kv_heads=heads // heads_at_once,
        scale=float(inputs.scale),
        soft_cap=0.0,
        sink_logits=sinks,
        sink_stride=4 * sinks.stride(0),
        statistics=None,
    )
    own = LatentArguments(
        q=q,
        q_row=q.stride(0) * size,
        q_head=q.stride(1) * size,
        window=RowsArguments.of(inputs.window_cache, inputs.window_slots),
        entries=RowsArguments.of(inputs.entry_cache, inputs.entry_slots),
    )
    most_rows = own.window.num_slots + own.entries.num_slots
    kernel = cpu_kernel("transom_kernels.latent_attention.cpu", "make_attend", **kind._asdict())
    scratch_bytes = decode_layout(kind).num_bytes + 8 * (most_rows + 16)  # the layout, then the list of a query's rows
    launch(kernel, rows * (heads // heads_at_once), (result, own), scratch_bytes=scratch_bytes)
    return out


def make_attend(**parameters: Any) -> Any:
    """Build the kernel; the parameters are the fields of `AttentionKind`. A work item is a query and a group of heads."""
    kind = AttentionKind(**parameters)
    layout, heads, row_bytes = decode_layout(kind), kind.group, kind.width * NUM_BYTES[kind.dtype]
    list_at = layout.num_bytes  # addresses of the query's rows
    copy_row, move_row = make_copy_row(kind.words, kind.width), make_move_row(kind.dtype, kind.width)
    zero = np.float32(0.0)

    @helper
    def list_rows(arguments, rows, memory, query, count):
        """Append the addresses of a query's rows (window or entries) to a list of `count` addresses; return the new count."""
        slots = argument(arguments, rows.slots) + query * argument(arguments, rows.slot_row)
        size = argument(arguments, rows.block_rows)
        for i in range(argument(arguments, rows.num_slots)):
            slot = load_i64(slots + 8 * i)
            if slot >= 0:
                offset = slot // size * argument(arguments, rows.block) + slot % size * argument(arguments, rows.row)
                store_i64(memory + list_at + 8 * count, argument(arguments, rows.cache) + offset)
                count += 1
        return count

    @helper
    def find_groups(arguments, memory, query, head_group, begin, end, keys, values):
        """Write the address of each group of 16 listed rows: in the cache if its rows are adjacent there, else of a copy."""
        copy = memory + layout.key_copies
        for first in range(begin, end, 16):
            rows = memory + list_at + 8 * first
            group = load_i64(rows)
            is_dense = first + 16 <= end
            for t in range(1, min(16, end - first)):
                is_dense = is_dense and load_i64(rows + 8 * t) == group + t * row_bytes
            if not is_dense:
                group = copy
                for at in range(0, 16 * row_bytes, 64):
                    store_f32(copy + at, splat(zero))
                for t in range(min(16, end - first)):
                    move_row(load_i64(rows + 8 * t), copy + t * row_bytes)
                copy += 16 * row_bytes
            store_i64(keys, group)
            store_i64(values, group)
            keys, values = keys + 8, values + 8

    attend_unit = make_attend_unit(kind, find_groups)
    merge, clear, store = make_partial_results(kind)

    @helper
    def attend_query(arguments, memory, query, head_group):
        """Compute and store one group of heads of one query."""
        head_stride = argument(arguments, LATENT.q_head)
        q = argument(arguments, LATENT.q) + query * argument(arguments, LATENT.q_row) + head_group * heads * head_stride
        for head in range(heads):
            copy_row(q + head * head_stride, memory + layout.queries + head * layout.query_stride)
        count = list_rows(arguments, LATENT.window, memory, query, 0)
        count = list_rows(arguments, LATENT.entries, memory, query, count)
        total, partial = memory + layout.total, memory + layout.partial
        if count == 0:
            clear(total)
        for begin in range(0, count, UNIT_KEYS):
            end = min(begin + UNIT_KEYS, count)
            attend_unit(arguments, memory, query, head_group, begin, end, partial if begin > 0 else total)
            if begin > 0:
                merge(total, partial)
        store(arguments, query, head_group, total)

    @each_item
    def attend(arguments, thread, item):
        head_groups = argument(arguments, RESULT.kv_heads)
        attend_query(arguments, scratch(thread), item // head_groups, item % head_groups)

    return attend

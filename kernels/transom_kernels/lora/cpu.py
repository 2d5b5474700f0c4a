"""`add_lora_` on CPUs: the kernels `shrink` and `expand`, and their launches.

    shrink:  inner[m, j] = sum_k a[s, j, k] * x[m, k]                              j = 0 to P * R - 1, s = slots[m]
    expand:  y[m, n] += scales[s, p] * sum_r b[s, r, n] * inner[m, p * R + r]      p is the part of column n

A work item is a block of up to BLOCK_ROWS rows and some columns of the result (j or n). It multiplies all rows of the block that
have the same slot together, wherever they are, so that it reads the weights of each slot about once: its *members* are a list of
their numbers (int64). Tiles of several members share what they load of the weights. A sum has the same order in every tile, so a
row's result does not depend on other rows.

Legend: M rows, K input width, N output width of all parts, S slots, P parts, R the largest rank.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from llvmlite import ir

from transom_kernels.cpu.arguments import Arguments, RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.language import INT, NOTHING, emits
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.pool import pool
from transom_kernels.cpu.rows import emit_dots
from transom_kernels.cpu.simd import NUM_BYTES, fma, load_i32, load_i64, load_scalar_f32, row_access, splat, store_i64
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.vector_code import I64, int64, load, store
from transom_kernels.cpu.work import argument, each_item, helper, row_address, scratch
from transom_kernels.lora.reference import LoraWeights

BLOCK_ROWS = 64
_ITEMS_PER_THREAD = 4
_DOTS = 4  # columns of `shrink` that are computed together for one row; ranks are multiples of 8
_STRIP = 64  # columns of `expand` in an item are a multiple of this
_MODULE = "transom_kernels.lora.cpu"


class ItemArguments(NamedTuple):
    """The argument words that both kernels begin with."""

    slots: torch.Tensor  # [M] int32
    num_rows: int  # M
    num_columns: int  # P * R in `shrink`, N in `expand`
    item_columns: int


class ShrinkArguments(NamedTuple):
    """The argument words of the kernel `shrink`."""

    item: ItemArguments
    x: RowArguments  # [M, K]
    inner: RowArguments  # [M, P * R] float32
    a: RowArguments  # [S, P * R, K], contiguous
    width: int  # K


class ExpandArguments(NamedTuple):
    """The argument words of the kernel `expand`."""

    item: ItemArguments
    y: RowArguments  # [M, N]
    inner: RowArguments  # [M, P * R] float32
    b: RowArguments  # [S, R, N], contiguous
    scales: RowArguments  # [S, P] float32
    rank: int  # R
    num_parts: int  # P
    starts: Any  # P + 1 words


ITEM, SHRINK, EXPAND = numbers_of(ItemArguments), numbers_of(ShrinkArguments), numbers_of(ExpandArguments)


def fits_cpu_kernel(y: torch.Tensor, x: torch.Tensor) -> bool:
    """Return whether the kernels take this dtype and these strides: the numbers of a row must be adjacent."""
    return x.dtype in DTYPES and y.stride(1) == x.stride(1) == 1


def add_lora_cpu_(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, weights: LoraWeights) -> None:
    """Add scale * B (A x) of each row's adapter to `y` [M, N], from `x` [M, K] and `slots` [M], of which -1 is no adapter."""
    dtype, tile = DTYPES[x.dtype], 4 if cpu_target().avx512 else 2
    rows, scratch_bytes = RowArguments.of, 16 * BLOCK_ROWS
    inner = empty((len(x), weights.a.shape[1]), torch.float32)
    item, num_items = _items(slots, inner.shape[1], _DOTS)
    words: Arguments = ShrinkArguments(item, rows(x), rows(inner), rows(weights.a), x.shape[1])
    launch(cpu_kernel(_MODULE, "make_shrink", dtype=dtype, tile=tile), num_items, words, scratch_bytes=scratch_bytes)
    item, num_items = _items(slots, y.shape[1], _STRIP)
    sizes = weights.rank, weights.scales.shape[1], weights.starts
    words = ExpandArguments(item, rows(y), rows(inner), rows(weights.b), rows(weights.scales), *sizes)
    launch(cpu_kernel(_MODULE, "make_expand", dtype=dtype), num_items, words, scratch_bytes=scratch_bytes)


def _items(slots: torch.Tensor, num_columns: int, unit: int) -> tuple[ItemArguments, int]:
    """Return how work is cut, and the number of items: the columns of a block make several items only if blocks are few."""
    num_blocks = -(-len(slots) // BLOCK_ROWS)
    wanted = max(1, _ITEMS_PER_THREAD * pool().num_threads // max(1, num_blocks))  # items of a block
    per_item = -(-num_columns // (wanted * unit)) * unit
    return ItemArguments(slots, len(slots), num_columns, per_item), num_blocks * -(-num_columns // per_item)


def _each_slot(multiply: Any) -> Callable[..., None]:
    """Make a kernel that calls multiply(arguments, slot, members, count, first, end) for each slot among the rows of an item.

    The slot's `count` members are a list at address `members`; the item has the columns from `first` up to, not including, `end`.
    """

    @each_item
    def kernel(arguments, thread, item):
        num_columns, per_item = argument(arguments, ITEM.num_columns), argument(arguments, ITEM.item_columns)
        items_of_block = (num_columns + per_item - 1) // per_item
        row, first = item // items_of_block * BLOCK_ROWS, item % items_of_block * per_item
        end, count = min(first + per_item, num_columns), min(BLOCK_ROWS, argument(arguments, ITEM.num_rows) - row)
        slots, members = scratch(thread), scratch(thread) + 8 * BLOCK_ROWS
        for i in range(count):
            store_i64(slots + 8 * i, load_i32(argument(arguments, ITEM.slots) + 4 * (row + i)))
        for i in range(count):
            slot, found = load_i64(slots + 8 * i), 0
            if slot >= 0:
                for j in range(i, count):
                    if load_i64(slots + 8 * j) == slot:
                        store_i64(members + 8 * found, row + j)
                        store_i64(slots + 8 * j, -1)
                        found += 1
                multiply(arguments, slot, members, found, first, end)

    return kernel


def make_shrink(dtype: str, tile: int) -> Callable[..., None]:
    """Build the kernel `shrink`, which multiplies `tile` members by `tile` rows of A at once."""
    many, one, size = _make_dots(dtype, tile, tile), _make_dots(dtype, 1, _DOTS), NUM_BYTES[dtype]

    @helper
    def shrink(arguments, slot, members, count, first, end):
        x, x_stride = argument(arguments, SHRINK.x.tensor), argument(arguments, SHRINK.x.stride)
        width = argument(arguments, SHRINK.width)
        inner, inner_stride = argument(arguments, SHRINK.inner.tensor), argument(arguments, SHRINK.inner.stride)
        a = row_address(arguments, SHRINK.a, slot)
        for i in range(0, count - tile + 1, tile):
            for j in range(first, end, tile):
                many(members + 8 * i, x, x_stride, a + j * width * size, width, inner + 4 * j, inner_stride)
        for i in range(count - count % tile, count):
            for j in range(first, end, _DOTS):
                one(members + 8 * i, x, x_stride, a + j * width * size, width, inner + 4 * j, inner_stride)

    return _each_slot(shrink)


def make_expand(dtype: str) -> Callable[..., None]:
    """Build the kernel `expand`, which adds the products of 16 columns to four members at once."""
    load_lanes, store_lanes, size = row_access(dtype)

    @helper
    def add_(place, total, scale, columns):
        store_lanes(place, fma(total, splat(scale), load_lanes(place, columns)), columns)

    @helper
    def add_products(arguments, members, count, inner, b, scale, y, columns):
        """Change up to 16 columns of up to four members; of fewer, the last one's sums are computed again and not stored."""
        inner_stride, y_stride = argument(arguments, EXPAND.inner.stride), argument(arguments, EXPAND.y.stride)
        b_stride = argument(arguments, ITEM.num_columns) * size
        m0, m1 = load_i64(members), load_i64(members + 8 * min(1, count - 1))
        m2, m3 = load_i64(members + 8 * min(2, count - 1)), load_i64(members + 8 * min(3, count - 1))
        t0, t1, t2, t3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
        for r in range(argument(arguments, EXPAND.rank)):
            numbers, place = load_lanes(b + r * b_stride, columns), inner + 4 * r
            t0 = fma(numbers, splat(load_scalar_f32(place + m0 * inner_stride)), t0)
            t1 = fma(numbers, splat(load_scalar_f32(place + m1 * inner_stride)), t1)
            t2 = fma(numbers, splat(load_scalar_f32(place + m2 * inner_stride)), t2)
            t3 = fma(numbers, splat(load_scalar_f32(place + m3 * inner_stride)), t3)
        add_(y + m0 * y_stride, t0, scale, columns)
        if count > 1:
            add_(y + m1 * y_stride, t1, scale, columns)
        if count > 2:
            add_(y + m2 * y_stride, t2, scale, columns)
        if count > 3:
            add_(y + m3 * y_stride, t3, scale, columns)

    @helper
    def expand(arguments, slot, members, count, first, end):
        for part in range(argument(arguments, EXPAND.num_parts)):
            inner = argument(arguments, EXPAND.inner.tensor) + 4 * part * argument(arguments, EXPAND.rank)
            scale = load_scalar_f32(row_address(arguments, EXPAND.scales, slot) + 4 * part)
            start, stop = argument(arguments, EXPAND.starts + part), argument(arguments, EXPAND.starts + part + 1)
            for n in range(max(first, start), min(end, stop), 16):
                b = row_address(arguments, EXPAND.b, slot) + n * size
                y = argument(arguments, EXPAND.y.tensor) + n * size
                for i in range(0, count, 4):
                    add_products(arguments, members + 8 * i, count - i, inner, b, scale, y, min(end, stop) - n)

    return _each_slot(expand)


def _rows_of(b: ir.IRBuilder, members: ir.Value, count: int, first: ir.Value, stride: ir.Value) -> list[ir.Value]:
    """Return the addresses of the rows of `count` members; row 0 is at address `first`."""
    return [b.add(first, b.mul(load(b, b.add(members, int64(8 * i)), I64, 8), stride)) for i in range(count)]


def _make_dots(dtype: str, num_rows: int, num_columns: int) -> Any:
    """Build the function that stores the inner products of `num_rows` members' rows of x and `num_columns` rows of A in float32."""

    @emits(NOTHING, *[INT] * 7)
    def dots(b, members, x, x_stride, a, width, out, out_stride):
        row_bytes = b.mul(width, int64(NUM_BYTES[dtype]))
        a_rows = [b.add(a, b.mul(int64(j), row_bytes)) for j in range(num_columns)]
        totals = emit_dots(b, _rows_of(b, members, num_rows, x, x_stride), a_rows, width, dtype, dtype)
        out_rows = _rows_of(b, members, num_rows, out, out_stride)
        places = [b.add(row, int64(4 * j)) for row in out_rows for j in range(num_columns)]
        for place, total in zip(places, totals, strict=True):
            store(b, total, place, 4)

    return dots

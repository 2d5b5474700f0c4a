"""Two CPU kernels: `pack` writes a weight into panels (`layout.py`), and `embedding_rows` reads rows of a table, packed or plain.

Legend: M rows, K width, N outputs of a weight or rows of a table.
"""

from typing import Any

from transom_kernels.cpu.language import INT, NOTHING, emits, helper
from transom_kernels.cpu.simd import (
    float_of_bits,
    load_i32,
    load_i64,
    load_u8,
    row_access,
    splat,
    store_i32,
    store_i64,
    store_u8,
)
from transom_kernels.cpu.vector_code import I32_16, int64, load, store, transpose
from transom_kernels.cpu.work import argument, each_item, scratch
from transom_kernels.linear.layout import LINE, OUTPUTS, WORD


@emits(NOTHING, INT, INT, INT)
def _transpose(b, source, stride, target):
    """Transpose a block of 16 rows of 16 words; store it as 16 lines of 64 bytes at `target`."""
    rows = [load(b, b.add(source, b.mul(stride, int64(m))), I32_16, 4) for m in range(16)]
    for m, row in enumerate(transpose(b, rows)):
        store(b, row, b.add(target, int64(LINE * m)), LINE)


def make_pack() -> Any:
    """Build the kernel that packs rows into panels. A work item is a panel.

    Arguments: 0 weight, 1 its row stride in bytes, 2 N, 3 bytes of a row, 4 memory of the panels, 5 bytes of a panel, 6 the first
    panel to write, 7 the step to the next one (2 if gate and up alternate).
    """

    @helper
    def copy_block(source, stride, rows, count, block):
        """Copy `rows` rows of `count` bytes into a block of 16 rows of 64 bytes, followed by zeros."""
        for at in range(0, OUTPUTS * LINE, 8):
            store_i64(block + at, 0)
        for row in range(rows):
            for at in range(count):
                store_u8(block + row * LINE + at, load_u8(source + row * stride + at))

    @each_item
    def pack(arguments, thread, item):
        block = scratch(thread)
        stride, row_bytes, panel = argument(arguments, 1), argument(arguments, 3), argument(arguments, 5)
        rows = min(OUTPUTS, argument(arguments, 2) - item * OUTPUTS)
        source = argument(arguments, 0) + item * OUTPUTS * stride
        target = argument(arguments, 4) + (argument(arguments, 6) + item * argument(arguments, 7)) * panel
        for word in range(0, panel // LINE, 16):
            count = min(LINE, row_bytes - word * WORD)
            lines = min(16, panel // LINE - word)
            if rows == OUTPUTS and count == LINE:
                _transpose(source + word * WORD, stride, target + word * LINE)
            else:
                copy_block(source + word * WORD, stride, rows, max(0, count), block)
                _transpose(block, LINE, block + OUTPUTS * LINE)
                for at in range(0, lines * LINE, 8):
                    store_i64(target + word * LINE + at, load_i64(block + OUTPUTS * LINE + at))

    return pack


def make_embedding_rows(dtype: str, packed: bool) -> Any:
    """Build the kernel: out = table[ids - first] * scale, with zeros for ids that the table lacks. A work item is a row.

    Arguments: 0 ids, 1 table, 2 bytes of a panel, or of a row, 3 N, 4 K, 5 out, 6 its row stride in bytes, 7 first, 8 scale.
    """
    load_lanes, store_lanes, size = row_access(dtype)
    words = 16 * size // WORD  # of 16 numbers

    @each_item
    def embedding_rows(arguments, thread, item):
        row, width = load_i64(argument(arguments, 0) + 8 * item) - argument(arguments, 7), argument(arguments, 4)
        out, scale = argument(arguments, 5) + item * argument(arguments, 6), float_of_bits(argument(arguments, 8))
        exists = 0 <= row < argument(arguments, 3)
        for k in range(0, width, 16):
            count, lanes = min(16, width - k), splat(0.0)
            if exists:
                if packed:
                    place = argument(arguments, 1) + row // OUTPUTS * argument(arguments, 2)
                    place += row % OUTPUTS * WORD + k // 16 * words * LINE
                    own = scratch(thread)
                    for word in range((count * size + WORD - 1) // WORD):
                        store_i32(own + word * WORD, load_i32(place + word * LINE))
                    lanes = load_lanes(own, count)
                else:
                    place = argument(arguments, 1) + row * argument(arguments, 2) + k * size
                    lanes = load_lanes(place, count)
                lanes = lanes * splat(scale)
            store_lanes(out + k * size, lanes, count)

    return embedding_rows

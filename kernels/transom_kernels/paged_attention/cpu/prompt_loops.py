"""The inner loops of prompts: packing of keys and values, and products. They are emitted as LLVM code to keep sums in registers.

Legend: R query rows, K words that are summed, N vectors of 16 columns.
"""

from __future__ import annotations

from transom_kernels.cpu.language import INT, NOTHING, emits
from transom_kernels.cpu.vector_code import F32_16, I32_16, I64, LANES, Loop, constant, int64, load, shuffle, store
from transom_kernels.paged_attention.cpu.layout import VECTOR_BYTES, Words
from transom_kernels.paged_attention.cpu.row_vectors import I16_32, multiply, row_vector, splat_at


def make_product(words: Words, rows: int, columns: int, strides: tuple[int, int, int], *, adds: bool):
    """Build product(c, a, panels, count): C = A B, or C += A B if `adds`, for `rows` rows and `columns` panels of 16 columns.

    A [R, K] and B [columns, K, 16] are words, C [R, columns * 16] is float32. `strides` are the bytes of a row of C, of a row of A
    and of a panel of B. `count` is K, above 0.
    """
    c_stride, a_stride, panel_stride = strides
    kind = I32_16 if words.pairs else F32_16

    @emits(NOTHING, INT, INT, INT, INT)
    def product(b, c, a, panels, count):
        places = [b.add(c, int64(r * c_stride + j * VECTOR_BYTES)) for r in range(rows) for j in range(columns)]
        zero = constant(F32_16, 0.0)
        initial = [load(b, place, F32_16, 64) if adds else zero for place in places]

        def body(k, sums):
            sums = list(sums)
            at = b.add(panels, b.shl(k, int64(6)))
            right = [load(b, b.add(at, int64(panel_stride * j)), kind, 64) for j in range(columns)]
            left = b.add(a, b.shl(k, int64(2)))
            for r in range(rows):
                word = splat_at(b, words, b.add(left, int64(r * a_stride)))
                for j in range(columns):
                    sums[r * columns + j] = multiply(b, words, sums[r * columns + j], right[j], word)
            return sums

        for place, total in zip(places, Loop(b, count, 1, initial, body).results, strict=True):
            store(b, total, place, 64)

    return product


def make_pack_keys(words: Words, width: int):
    """Build pack_keys(addresses, panel), which writes 16 keys as a panel [words of a key, 16]."""

    @emits(NOTHING, INT, INT)
    def pack_keys(b, addresses, panel):
        keys = [load(b, b.add(addresses, int64(8 * t)), I64, 8) for t in range(LANES)]
        for j in range(words.vectors(width)):
            columns = _transpose(b, [row_vector(b, words, key, j, width) for key in keys])
            for k, column in enumerate(columns):
                store(b, column, b.add(panel, int64((j * LANES + k) * VECTOR_BYTES)), 64)

    return pack_keys


def _transpose(b, rows):
    """Return the transpose of 16 vectors: lane i of vector j becomes lane j of vector i."""
    rows = list(rows)
    for s in (1, 2, 4, 8):
        low = [lane if not lane & s else LANES + lane - s for lane in range(LANES)]
        high = [lane + s if not lane & s else LANES + lane for lane in range(LANES)]
        for i in range(LANES):
            if not i & s:
                x, y = rows[i], rows[i + s]
                rows[i], rows[i + s] = shuffle(b, x, y, low), shuffle(b, x, y, high)
    return rows


def make_pack_values(words: Words, width: int, panel_stride: int):
    """Build pack_values(addresses, out), which writes two values as rows of panels: one row of pairs, or two rows of float32.

    A panel has 16 columns of the values; panels lie `panel_stride` bytes apart.
    """

    @emits(NOTHING, INT, INT)
    def pack_values(b, addresses, out):
        values = [load(b, b.add(addresses, int64(8 * t)), I64, 8) for t in range(2)]
        for j in range(words.vectors(width)):
            x, y = (row_vector(b, words, value, j, width) for value in values)
            if words.pairs:
                x, y = b.bitcast(x, I16_32), b.bitcast(y, I16_32)
                for part in range(2):
                    lanes = [s * 32 + part * 16 + d for d in range(16) for s in (0, 1)]
                    pairs = b.bitcast(shuffle(b, x, y, lanes), I32_16)
                    store(b, pairs, b.add(out, int64((2 * j + part) * panel_stride)), 64)
            else:
                for t, vector in enumerate((x, y)):
                    store(b, vector, b.add(out, int64(j * panel_stride + t * VECTOR_BYTES)), 64)

    return pack_values

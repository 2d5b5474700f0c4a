"""The matrix products of a prompt's tile, queries times packed keys and weights times packed values, and the packing of both.

AMX tile registers multiply bfloat16 if the processor has them. Vector registers multiply everything else: those loops are emitted
as LLVM code to keep sums in registers.

Legend: R query rows, K words that are summed (`layout.Words`), N vectors of 16 columns.
"""

from typing import Any

from transom_kernels.cpu.language import INT, NOTHING, emits
from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.tiles import make_tile_product
from transom_kernels.cpu.vector_code import (
    F32_16,
    I32_16,
    I64,
    LANES,
    Loop,
    constant,
    int64,
    load,
    shuffle,
    store,
    transpose,
)
from transom_kernels.cpu.work import helper
from transom_kernels.paged_attention.cpu.layout import SUB_ROWS, VECTOR_BYTES, AttentionKind, Words, prompt_layout
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
            columns = transpose(b, [row_vector(b, words, key, j, width) for key in keys])
            for k, column in enumerate(columns):
                store(b, column, b.add(panel, int64((j * LANES + k) * VECTOR_BYTES)), 64)

    return pack_keys


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


_TILE_ROWS = 16  # rows of a tile register


def make_multiply_keys(kind: AttentionKind) -> Any:
    """Build multiply_keys(memory, row, num_keys): scores of SUB_ROWS rows and the first `num_keys` packed keys.

    `num_keys` is a multiple of 32.
    """
    words, layout = kind.words, prompt_layout(kind)
    if kind.uses_tiles:
        tile_product = make_tile_product(2)
        num_steps = words.vectors(kind.width)

        @helper
        def multiply_keys(memory, row, num_keys):
            rows, scores = memory + layout.queries + row * layout.query_stride, memory + layout.scores
            for k in range(0, num_keys, 32):
                panel = memory + layout.keys + k // 16 * layout.key_panel
                tile_product(
                    (rows, rows + _TILE_ROWS * layout.query_stride),
                    layout.query_stride,
                    (panel, panel + layout.key_panel),
                    num_steps,
                    (scores + 4 * k, scores + 4 * k + _TILE_ROWS * layout.score_stride),
                    layout.score_stride,
                    0,
                    _TILE_ROWS,
                )

        return multiply_keys
    num_words = -(-kind.width // words.elements)
    rows, columns = _shape()
    strides = (layout.score_stride, layout.query_stride, layout.key_panel)
    product = make_product(words, rows, columns, strides, adds=False)

    @helper
    def multiply_keys_by_vectors(memory, row, num_keys):
        for k in range(0, num_keys, 16 * columns):
            for r in range(0, SUB_ROWS, rows):
                product(
                    memory + layout.scores + r * layout.score_stride + 4 * k,
                    memory + layout.queries + (row + r) * layout.query_stride,
                    memory + layout.keys + k // 16 * layout.key_panel,
                    num_words,
                )

    return multiply_keys_by_vectors


def make_multiply_values(kind: AttentionKind) -> Any:
    """Build multiply_values(memory, row, num_keys): it adds the weighted sums of values to the results of SUB_ROWS rows."""
    words, layout = kind.words, prompt_layout(kind)
    num_panels, elements = words.output_vectors(kind.value_width), words.elements
    if kind.uses_tiles:
        tile_product = make_tile_product(2)

        @helper
        def multiply_values(memory, row, num_keys):
            weights, out = memory + layout.weights, memory + layout.outputs + row * layout.value_stride
            for j in range(0, num_panels, 2):
                panel = memory + layout.values + j * layout.value_panel
                tile_product(
                    (weights, weights + _TILE_ROWS * layout.weight_stride),
                    layout.weight_stride,
                    (panel, panel + layout.value_panel),
                    num_keys // 32,
                    (out + 64 * j, out + 64 * j + _TILE_ROWS * layout.value_stride),
                    layout.value_stride,
                    1,
                    _TILE_ROWS,
                )

        return multiply_values
    rows, columns = _shape()
    strides = (layout.value_stride, layout.weight_stride, layout.value_panel)
    product, single = (make_product(words, rows, count, strides, adds=True) for count in (columns, 1))
    odd = num_panels % columns

    @helper
    def multiply_values_by_vectors(memory, row, num_keys):
        for r in range(0, SUB_ROWS, rows):
            out, weights = (
                memory + layout.outputs + (row + r) * layout.value_stride,
                memory + layout.weights + r * layout.weight_stride,
            )
            for j in range(0, num_panels - odd, columns):
                product(out + 64 * j, weights, memory + layout.values + j * layout.value_panel, num_keys // elements)
            if odd:
                j = num_panels - 1
                single(out + 64 * j, weights, memory + layout.values + j * layout.value_panel, num_keys // elements)

    return multiply_values_by_vectors


def _shape() -> tuple[int, int]:
    """Return how many rows, and how many vectors of columns, are summed in registers at once."""
    return (8, 2) if cpu_target().avx512 else (4, 1)

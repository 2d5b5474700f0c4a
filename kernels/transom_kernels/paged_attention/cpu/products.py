"""The two matrix products of a prompt's tile: queries times packed keys, and weights times packed values.

AMX tile registers multiply bfloat16 if the processor has them; vector registers multiply everything else.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.tiles import make_tile_product
from transom_kernels.cpu.work import helper
from transom_kernels.paged_attention.cpu.layout import SUB_ROWS, AttentionKind, prompt_layout
from transom_kernels.paged_attention.cpu.prompt_loops import make_product

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

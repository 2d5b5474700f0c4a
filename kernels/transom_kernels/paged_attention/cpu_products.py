"""The two matrix products of a prompt's tile: queries times packed keys, and weights times packed values.

Where the processor has tile registers (AMX), they compute bfloat16; else vectors do.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from transom_kernels.cpu.target import cpu_target
from transom_kernels.cpu.tiles import make_tile_product
from transom_kernels.paged_attention.cpu_inner_loops import make_product
from transom_kernels.paged_attention.cpu_layout import SUB_ROWS, PromptLayout, uses_tiles, words_of

_TILE_ROWS = 16  # of a tile register


def make_multiply_keys(dtype: str, group: int, width: int, value_width: int) -> Any:
    """multiply_keys(scratch, row, num_keys): scores of SUB_ROWS rows and the first `num_keys` (a multiple of 32) packed keys."""
    words, layout = words_of(dtype), PromptLayout(dtype, group, width, value_width)
    queries_at, scores_at, keys_at = layout.queries, layout.scores, layout.keys
    query_stride, score_stride, key_panel = layout.query_stride, layout.score_stride, layout.key_panel
    if uses_tiles(dtype):
        tile_product = make_tile_product(2)
        num_steps = words.vectors(width)

        @njit
        def multiply_keys(scratch, row, num_keys):
            rows, scores = scratch + queries_at + row * query_stride, scratch + scores_at
            for k in range(0, num_keys, 32):
                panel = scratch + keys_at + k // 16 * key_panel
                tile_product(
                    (rows, rows + _TILE_ROWS * query_stride),
                    query_stride,
                    (panel, panel + key_panel),
                    num_steps,
                    (scores + 4 * k, scores + 4 * k + _TILE_ROWS * score_stride),
                    score_stride,
                    0,
                    _TILE_ROWS,
                )

        return multiply_keys
    num_words = -(-width // words.elements)
    rows, columns = _shape()
    product = make_product(words, rows, columns, (score_stride, query_stride, key_panel), adds=False)

    @njit
    def multiply_keys_by_vectors(scratch, row, num_keys):
        for k in range(0, num_keys, 16 * columns):
            for r in range(0, SUB_ROWS, rows):
                product(
                    scratch + scores_at + r * score_stride + 4 * k,
                    scratch + queries_at + (row + r) * query_stride,
                    scratch + keys_at + k // 16 * key_panel,
                    num_words,
                )

    return multiply_keys_by_vectors


def make_multiply_values(dtype: str, group: int, width: int, value_width: int) -> Any:
    """multiply_values(scratch, row, num_keys): add the weighted sums of `num_keys` values to the results of SUB_ROWS rows."""
    words, layout = words_of(dtype), PromptLayout(dtype, group, width, value_width)
    outputs_at, weights_at, values_at = layout.outputs, layout.weights, layout.values
    value_stride, weight_stride, value_panel = layout.value_stride, layout.weight_stride, layout.value_panel
    num_panels, elements = words.output_vectors(value_width), words.elements
    if uses_tiles(dtype):
        tile_product = make_tile_product(2)

        @njit
        def multiply_values(scratch, row, num_keys):
            weights, out = scratch + weights_at, scratch + outputs_at + row * value_stride
            for j in range(0, num_panels, 2):
                panel = scratch + values_at + j * value_panel
                tile_product(
                    (weights, weights + _TILE_ROWS * weight_stride),
                    weight_stride,
                    (panel, panel + value_panel),
                    num_keys // 32,
                    (out + 64 * j, out + 64 * j + _TILE_ROWS * value_stride),
                    value_stride,
                    1,
                    _TILE_ROWS,
                )

        return multiply_values
    rows, columns = _shape()
    strides = (value_stride, weight_stride, value_panel)
    product, single = (make_product(words, rows, count, strides, adds=True) for count in (columns, 1))
    odd = num_panels % columns

    @njit
    def multiply_values_by_vectors(scratch, row, num_keys):
        for r in range(0, SUB_ROWS, rows):
            out, weights = scratch + outputs_at + (row + r) * value_stride, scratch + weights_at + r * weight_stride
            for j in range(0, num_panels - odd, columns):
                product(out + 64 * j, weights, scratch + values_at + j * value_panel, num_keys // elements)
            if odd:
                j = num_panels - 1
                single(out + 64 * j, weights, scratch + values_at + j * value_panel, num_keys // elements)

    return multiply_values_by_vectors


def _shape() -> tuple[int, int]:
    """Rows and vectors of columns that are summed in registers at once."""
    return (8, 2) if cpu_target().avx512 else (4, 1)

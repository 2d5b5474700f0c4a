"""The last part of a linear layer's kernel: bias, scale, soft cap and residual, or a gated activation, in float32 before one
rounding.

    out = residual + cap(scale * (sums + bias)), where cap(y) is soft_cap * tanh(y / soft_cap)
    out = activation(gate sums + gate bias) * (up sums + up bias)

Each call finishes 16 neighbouring outputs of one row, whose sums (products of the row and the weight) it gets as a vector.

Legend: M rows, N output width.
"""

from typing import Any, NamedTuple

import torch

from transom_kernels.cpu.arguments import RowArguments
from transom_kernels.cpu.language import helper
from transom_kernels.cpu.rows import make_gated, soft_capped
from transom_kernels.cpu.simd import float_argument, load_f32, row_access, splat
from transom_kernels.cpu.work import argument, row_address


class OutputArguments(NamedTuple):
    """The argument words of a layer's output."""

    out: RowArguments  # [M, N]
    num_outputs: int  # N
    bias: (
        torch.Tensor | None
    )  # float32, padded to whole vectors; of gated layers: 16 gates, their 16 ups, 16 gates, ...
    residual: RowArguments = RowArguments(None, 0)  # [M, N]
    scale: float = 1.0
    soft_cap: float = 0.0  # 0: none


def make_store_output(dtype: str, at: OutputArguments) -> Any:
    """Build store_output(arguments, sums, row, column), which finishes and stores 16 outputs of a row.

    `at` has the numbers of the words of `OutputArguments`.
    """
    load, store, size = row_access(dtype)

    @helper
    def store_output(arguments, sums, row, column):
        bias, cap = argument(arguments, at.bias), float_argument(arguments, at.soft_cap)
        y = (sums + load_f32(bias + 4 * column) if bias else sums) * splat(float_argument(arguments, at.scale))
        if cap != 0.0:
            y = soft_capped(y, cap)
        has_residual = argument(arguments, at.residual.tensor) != 0
        before = row_address(arguments, at.residual, row) + column * size
        place = row_address(arguments, at.out, row) + column * size
        count = argument(arguments, at.num_outputs) - column
        store(place, y + load(before, count) if has_residual else y, count)

    return store_output


def make_store_gated(dtype: str, activation: str, at: OutputArguments) -> Any:
    """Build store_gated(arguments, gate, up, row, column), which finishes and stores 16 activations of a row.

    `at` has the numbers of the words of `OutputArguments`.
    """
    _, store, size = row_access(dtype)
    gated = make_gated(activation)

    @helper
    def store_gated(arguments, gate, up, row, column):
        bias = argument(arguments, at.bias)
        if bias:
            # the biases of gates [column, column + 16) follow those of `column` gates and ups; their ups' are 64 bytes further
            gate, up = gate + load_f32(bias + 8 * column), up + load_f32(bias + 8 * column + 64)
        place = row_address(arguments, at.out, row) + column * size
        store(place, gated(gate, up), argument(arguments, at.num_outputs) - column)

    return store_gated

"""Tile products of bfloat16 (AMX) for kernels.

A tile is a register of 16 rows of 64 bytes. A *step* multiplies a tile of x (up to 16 rows of 32 numbers) by a tile of the
weight (16 pairs of 16 outputs, pair after pair) and adds the product to a tile of sums (rows of 16 float32). The processor adds
a step's products in an order of its own, which is the same for any number of rows.

A thread calls `configure_tiles` before its products and `release_tiles` after them: in between, the operating system saves 8 KiB
more whenever it switches threads.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from transom_kernels.cpu.bounds import checked_address
from transom_kernels.cpu.language import INT, NOTHING, emits
from transom_kernels.cpu.vector_code import I8, Loop, emit_prefetch, function, int64, store

CONFIG_BYTES = 64  # of scratch, for `configure_tiles`
STEP_BYTES = 1024  # of a panel's weights

_AHEAD = 2048  # bytes from the weights in use to those that are fetched
_SUMS, _ROWS, _WEIGHTS = 0, 4, 6  # tiles 0 to 3, 4 and 5, 6 and 7
_BYTE = ir.PointerType(I8)


@emits(NOTHING, INT, INT)
def configure_tiles(b, memory, num_rows):
    """Set up the tiles for `num_rows` rows of x (1 to 16). `memory` is scratch."""
    widths = int64(0x0040_0040_0040_0040)  # bytes in a row of each of four tiles
    rows = b.or_(b.mul(num_rows, int64(0x0101_0101_0101)), int64(0x1010 << 48))  # of tiles 0 to 5, and of 6 and 7
    palette, nothing = int64(1), int64(0)
    for index, word in enumerate((palette, nothing, widths, widths, nothing, nothing, rows, nothing)):
        store(b, word, b.add(memory, int64(8 * index)))
    _call(b, "ldtilecfg", b.inttoptr(memory, _BYTE))


@emits(NOTHING)
def release_tiles(b):
    """Give the tiles back."""
    _call(b, "tilerelease")


def make_tile_product(num_row_tiles: int) -> Any:
    """Make the function that multiplies one or two tiles of rows by two panels. Arguments, addresses and strides in bytes:

    rows, row_stride     of x: the first row of each tile (a tuple), and from row to row
    weights              of the panels (a tuple)
    num_steps            at least 1
    sums, sum_stride     the first row of each tile of sums (a tuple), and from row to row; panels lie 64 bytes apart
    adds                 1: the sums in memory are added to; 0: they are overwritten
    num_rows             of each tile, as configured
    """

    @emits(NOTHING, (INT,) * num_row_tiles, INT, (INT, INT), INT, (INT,) * num_row_tiles, INT, INT, INT)
    def tile_product(b, rows, row_stride, weights, num_steps, sums, sum_stride, adds, num_rows):
        first_rows = [b.extract_value(rows, m) for m in range(num_row_tiles)]
        panels = [b.extract_value(weights, p) for p in range(2)]
        row_bytes, sum_bytes = (
            b.add(b.mul(b.sub(num_rows, int64(1)), stride), int64(64)) for stride in (row_stride, sum_stride)
        )
        tiles = [
            (_SUMS + 2 * m + p, b.add(b.extract_value(sums, m), int64(64 * p)))
            for m in range(num_row_tiles)
            for p in range(2)
        ]
        with b.if_else(b.icmp_signed("!=", adds, int64(0))) as (adding, starting):
            with adding:
                for tile, address in tiles:
                    _load(b, tile, address, sum_stride, sum_bytes)
            with starting:
                for tile, _ in tiles:
                    _call(b, "tilezero", _number(tile))

        def step(k: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            for m in range(num_row_tiles):
                _load(b, _ROWS + m, b.add(first_rows[m], b.mul(k, int64(64))), row_stride, row_bytes)
            for p in range(2):
                address = b.add(panels[p], b.mul(k, int64(STEP_BYTES)))
                for line in range(0, STEP_BYTES, 64):
                    emit_prefetch(b, b.add(address, int64(_AHEAD + line)))
                _load(b, _WEIGHTS + p, address, int64(64), STEP_BYTES)
                for m in range(num_row_tiles):
                    operands = (_SUMS + 2 * m + p, _ROWS + m, _WEIGHTS + p)
                    _call(b, "tdpbf16ps", *(_number(tile) for tile in operands))
            return carried

        Loop(b, num_steps, 1, [], step)
        for tile, address in tiles:
            pointer = b.inttoptr(checked_address(b, address, sum_bytes), _BYTE)
            _call(b, "tilestored64", _number(tile), pointer, sum_stride)

    return tile_product


def _call(b: ir.IRBuilder, name: str, *arguments: ir.Value) -> None:
    kinds = [argument.type for argument in arguments]
    b.call(function(b, f"llvm.x86.{name}", ir.VoidType(), kinds), arguments)


def _number(tile: int) -> ir.Constant:
    return ir.Constant(I8, tile)


def _load(b: ir.IRBuilder, tile: int, address: ir.Value, stride: ir.Value, num_bytes: ir.Value | int) -> None:
    pointer = b.inttoptr(checked_address(b, address, num_bytes), _BYTE)
    _call(b, "tileloadd64", _number(tile), pointer, stride)

"""Products of bfloat16 matrices by AMX tile registers, inside kernels.

A tile is a register of 16 rows of 64 bytes. A *panel* is the part of a weight for 16 outputs, as a sequence of tiles. A *step*
multiplies a tile of x (up to 16 rows of 32 numbers) by a tile of a panel (16 rows, each with a pair (k, k + 1) of 16 outputs) and
adds the product to a tile of sums (rows of 16 float32). The processor adds the products of a step in an order of its own, which is
the same for any number of rows. A kernel calls

    configure_tiles(memory, num_rows)
    tile_product(...)                   as often as needed
    release_tiles()                     until then Linux saves 8 KiB of tile registers at each thread switch
"""

from typing import Any

from llvmlite import ir

from transom_kernels.cpu.bounds import checked_address
from transom_kernels.cpu.language import INT, NOTHING, emits
from transom_kernels.cpu.vector_code import I8, Loop, emit_prefetch, function, int64, store

CONFIG_BYTES = 64  # of scratch that `configure_tiles` needs
STEP_BYTES = 1024  # of a panel that one step multiplies

_AHEAD = 2048  # bytes from the weights in use to those that are prefetched
_SUMS, _ROWS, _WEIGHTS = 0, 4, 6  # tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights
_BYTE = ir.PointerType(I8)


@emits(NOTHING, INT, INT)
def configure_tiles(b, memory, num_rows):
    """Set up the tiles for `num_rows` rows of x (1 to 16). `memory` is CONFIG_BYTES of scratch.

    The processor reads there the palette in the first byte, the bytes of a row of tile i as 16 bits at byte 16 + 2 i, and the rows
    of tile i as 8 bits at byte 48 + i.
    """
    widths = int64(0x0040_0040_0040_0040)  # 64 bytes, for each of four tiles
    rows = b.or_(b.mul(num_rows, int64(0x0101_0101_0101)), int64(0x1010 << 48))  # tiles 0 to 5: num_rows; 6 and 7: 16
    palette, nothing = int64(1), int64(0)
    for index, word in enumerate((palette, nothing, widths, widths, nothing, nothing, rows, nothing)):
        store(b, word, b.add(memory, int64(8 * index)))
    _call(b, "ldtilecfg", b.inttoptr(memory, _BYTE))


@emits(NOTHING)
def release_tiles(b):
    """Release the tile registers."""
    _call(b, "tilerelease")


def make_tile_product(num_row_tiles: int) -> Any:
    """Build the function that multiplies one or two tiles of rows by two panels. Its arguments (strides are in bytes):

    rows, row_stride     addresses of the first row of each tile of x (a tuple), and stride
    weights              addresses of the panels (a tuple)
    num_steps            at least 1
    sums, sum_stride     addresses of the first row of each tile of sums (a tuple), and stride; 64 bytes further: the second panel's
    adds                 1: products are added to the sums in memory; 0: the sums are overwritten
    num_rows             rows of each tile, as configured
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

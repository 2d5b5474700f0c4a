"""The kernel of linear layers on CPUs: x @ weight.T over packed weights, with what belongs to it done in float32 before the one
rounding. `cpu.py` launches it.

- method: how rows and panels are multiplied (`layout.py`).
- group: the two panels that are multiplied together; in a gated weight they are a panel of gate and one of up.
- block: the rows of an item. With a long K their products with some groups come in chunks of K, so that a chunk of the rows stays
  in the second-level cache.

Legend: M rows, K input width, N output width.
"""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.language import helper, inlined
from transom_kernels.cpu.rows import limited_gate, limited_up, make_gated, make_inverse_rms, soft_capped
from transom_kernels.cpu.simd import (
    LOAD,
    LOAD_PART,
    NUM_BYTES,
    ROUND,
    STORE,
    float_of_bits,
    load_f32,
    row_access,
    splat,
)
from transom_kernels.cpu.tiles import CONFIG_BYTES, configure_tiles, make_tile_product, release_tiles
from transom_kernels.cpu.work import argument, claim, finish, scratch
from transom_kernels.linear.layout import GROUPS_OF_CHUNK, LINE, STEP_BYTES, TILE_ROWS, VECTOR_TILES
from transom_kernels.linear.vector_product import make_vector_product

SUM_STRIDE = 2 * LINE  # from row to row of a group's sums


def make_linear(
    method: str, dtype: str, out_dtype: str, activation: str | None, norm_dtype: str | None, registers: int
) -> Any:
    """out = residual + cap(scale * (x @ weight.T + bias)); with an activation, activation(x @ gate.T + bias) * (x @ up.T + bias).

    With `norm_dtype` x is replaced by rms_norm(x, norm). An item is some groups of panels and a block of rows. Arguments:
     0 x, 1 its row stride in bytes, 2 M, 3 K, 4 weight, 5 bytes of a panel, 6 panels, 7 N, 8 bias (float32, padded) or 0,
     9 residual or 0, 10 its row stride, 11 out, 12 its row stride, 13 scale, 14 soft cap or 0, 15 limit or 0, 16 rows of a block,
    17 groups of an item, 18 steps of a chunk, 19 row stride of x in scratch, or 0 where x is multiplied from where it is,
    20 bytes in scratch in front of x, 21 norm, 22 eps.
    """
    product = _make_tiles() if method == "tiles" else _make_vectors(method, dtype, registers)
    copy_rows = _make_copy(method, dtype, norm_dtype)
    tiles, step_bytes = method == "tiles", STEP_BYTES[method]
    store_group = _make_gate(out_dtype, tiles, activation) if activation else _make_output(out_dtype, tiles)
    step_of_x = {"tiles": 64, "pairs": 4, "wide": 4 if dtype == "f32" else 8}[method]

    def linear(arguments, thread):
        item = claim(thread)
        memory = scratch(thread)
        sums = memory + CONFIG_BYTES
        copied, configured = -1, 0
        while item >= 0:
            x, x_stride = argument(arguments, 0), argument(arguments, 1)
            panel, num_panels = argument(arguments, 5), argument(arguments, 6)
            block, per_item, chunk = argument(arguments, 16), argument(arguments, 17), argument(arguments, 18)
            items_of_block = (num_panels + 2 * per_item - 1) // (2 * per_item)
            first_row, part = item // items_of_block * block, item % items_of_block
            rows, num_steps = min(block, argument(arguments, 2) - first_row), panel // step_bytes
            x += first_row * x_stride
            if argument(arguments, 19):
                own, own_stride = memory + argument(arguments, 20), argument(arguments, 19)
                if copied != first_row:
                    width, eps = argument(arguments, 3), float_of_bits(argument(arguments, 22))
                    copy_rows(x, x_stride, rows, width, own, own_stride, argument(arguments, 21), eps)
                    copied = first_row
                x, x_stride = own, own_stride
            if tiles and configured != min(rows, TILE_ROWS):
                configured = min(rows, TILE_ROWS)
                configure_tiles(memory, configured)
            first, last = 2 * part * per_item, min(2 * (part + 1) * per_item, num_panels)
            matrix, num_outputs = argument(arguments, 4), argument(arguments, 7)
            if num_steps <= chunk:
                for p in range(first, last, 2):
                    weight = matrix + p * panel
                    other = weight + panel if p + 1 < num_panels else weight
                    row = 0
                    while row < rows:
                        count = rows - row
                        if count >= 3 * TILE_ROWS:  # else a last tile could not repeat rows
                            count = 2 * TILE_ROWS
                        product(x + row * x_stride, x_stride, count, weight, other, num_steps, sums, 0)
                        store_group(arguments, sums, count, first_row + row, p, num_outputs)
                        row += count
            else:
                sums_of_group = (block + TILE_ROWS) * SUM_STRIDE
                for begin in range(first, last, 2 * GROUPS_OF_CHUNK):
                    end = min(begin + 2 * GROUPS_OF_CHUNK, last)
                    for step in range(0, num_steps, chunk):
                        here, count = x + step * step_of_x, min(chunk, num_steps - step)
                        for p in range(begin, end, 2):
                            weight = matrix + p * panel + step * step_bytes
                            other = weight + panel if p + 1 < num_panels else weight
                            own_sums = sums + (p - begin) // 2 * sums_of_group
                            product(here, x_stride, rows, weight, other, count, own_sums, 1 if step else 0)
                    for p in range(begin, end, 2):
                        own_sums = sums + (p - begin) // 2 * sums_of_group
                        store_group(arguments, own_sums, rows, first_row, p, num_outputs)
            finish(thread)
            item = claim(thread)
        if tiles and configured:
            release_tiles()

    return linear


def _make_tiles() -> Any:
    """The product by AMX. The last tile of a block may repeat rows of the one before."""
    one, two = make_tile_product(1), make_tile_product(2)

    @helper
    def product(x, x_stride, rows, weight, other, num_steps, sums, adds):
        tile = min(rows, TILE_ROWS)
        for row in range(0, rows, 2 * TILE_ROWS):
            first, out = x + min(row, rows - tile) * x_stride, sums + row * SUM_STRIDE
            if row + TILE_ROWS < rows:
                second = x + min(row + TILE_ROWS, rows - tile) * x_stride
                outs = (out, out + TILE_ROWS * SUM_STRIDE)
                two((first, second), x_stride, (weight, other), num_steps, outs, SUM_STRIDE, adds, tile)
            else:
                one((first,), x_stride, (weight, other), num_steps, (out,), SUM_STRIDE, adds, tile)

    return product


def _make_vectors(method: str, dtype: str, registers: int) -> Any:
    """The product in vector registers, by tiles of as many rows as fit into them, and of few rows."""
    (many, panels), (few, panels_of_few) = VECTOR_TILES[registers, dtype]
    pairs = method == "pairs"
    of_many, of_few = _make_rows(many, panels, dtype, pairs), _make_rows(few, panels_of_few, dtype, pairs)
    of_one = _make_rows(1, 2, dtype, pairs)

    @helper
    def product(x, x_stride, rows, weight, other, num_steps, sums, adds):
        row = 0
        while row < rows:
            here, out, left = x + row * x_stride, sums + row * SUM_STRIDE, rows - row
            if left == 1:
                of_one(here, x_stride, left, weight, other, num_steps, out, adds)
                row += 1
            elif left <= few:
                of_few(here, x_stride, left, weight, other, num_steps, out, adds)
                row += few
            else:
                of_many(here, x_stride, left, weight, other, num_steps, out, adds)
                row += many

    return product


def _make_rows(most: int, panels: int, dtype: str, pairs: bool) -> Any:
    """Up to `most` rows times two panels, both at once or (`panels` 1) one after the other."""
    tile = make_vector_product(most, panels, dtype, pairs=pairs)

    @helper
    def both(x, x_stride, rows, weight, other, num_steps, out, adds):
        tile(x, x_stride, rows, (weight, other), num_steps, out, SUM_STRIDE, adds)

    @helper
    def in_turn(x, x_stride, rows, weight, other, num_steps, out, adds):
        tile(x, x_stride, rows, (weight,), num_steps, out, SUM_STRIDE, adds)
        tile(x, x_stride, rows, (other,), num_steps, out + LINE, SUM_STRIDE, adds)

    return both if panels == 2 else in_turn


def _make_copy(method: str, dtype: str, norm_dtype: str | None) -> Any:
    """Copy rows of x into scratch: padded with zeros, in float32 for the wide method, and normalised."""
    load, load_part, size = LOAD[dtype], LOAD_PART[dtype], NUM_BYTES[dtype]
    stored = "f32" if method == "wide" else dtype
    store, own_size, rounded = STORE[stored], NUM_BYTES[stored], ROUND[dtype]
    normalises = norm_dtype is not None
    load_norm, load_norm_part = LOAD[norm_dtype or "f32"], LOAD_PART[norm_dtype or "f32"]
    norm_size, inverse_rms = NUM_BYTES[norm_dtype or "f32"], make_inverse_rms(dtype)

    @helper
    def copy_rows(x, x_stride, rows, width, own, own_stride, norm, eps):
        full, rest = width // 16 * 16, width % 16
        for row in range(rows):
            source, target = x + row * x_stride, own + row * own_stride
            factor = splat(1.0)
            if normalises:
                factor = splat(inverse_rms(source, width, eps))
            for k in range(0, full, 16):
                lanes = load(source + k * size)
                if normalises:
                    lanes = rounded(lanes * factor * load_norm(norm + k * norm_size))
                store(target + k * own_size, lanes)
            k = full
            if rest:
                lanes = load_part(source + k * size, rest)
                if normalises:
                    lanes = rounded(lanes * factor * load_norm_part(norm + k * norm_size, rest))
                store(target + k * own_size, lanes)
                k += 16
            while k * own_size < own_stride - LINE:  # the weights are padded to whole steps
                store(target + k * own_size, splat(0.0))
                k += 16

    return copy_rows


@inlined
def _add_bias(arguments, lanes, column):
    bias = argument(arguments, 8)
    return lanes + load_f32(bias + column * 4) if bias else lanes


def _make_output(dtype: str, tiles: bool) -> Any:
    """Store a group's sums: bias, scale, soft cap, residual."""
    load, load_part, store, store_part, size = row_access(dtype)

    @helper
    def output(arguments, sums, rows, first_row, panel, num_outputs):
        scale, bound = splat(float_of_bits(argument(arguments, 13))), float_of_bits(argument(arguments, 14))
        residual, out = argument(arguments, 9), argument(arguments, 11)
        repeated = _repeated_rows(rows) if tiles else 0
        is_plain = residual == 0 and argument(arguments, 8) == 0 and bound == 0.0
        if is_plain and float_of_bits(argument(arguments, 13)) == 1.0 and panel * 16 + 32 <= num_outputs:
            place = out + first_row * argument(arguments, 12) + panel * 16 * size
            for row in range(rows):
                own = sums + (row + (repeated if row >= rows // TILE_ROWS * TILE_ROWS else 0)) * SUM_STRIDE
                store(place, load_f32(own))
                store(place + 16 * size, load_f32(own + LINE))
                place += argument(arguments, 12)
            return
        for row in range(rows):
            own = sums + (row + (repeated if row >= rows // TILE_ROWS * TILE_ROWS else 0)) * SUM_STRIDE
            before = residual + (first_row + row) * argument(arguments, 10)
            place = out + (first_row + row) * argument(arguments, 12)
            for column in range(panel * 16, min(panel * 16 + 32, num_outputs), 16):
                lanes = _add_bias(arguments, load_f32(own + (column - panel * 16) * 4), column) * scale
                if bound != 0.0:
                    lanes = soft_capped(lanes, bound)
                count = num_outputs - column
                if count >= 16:
                    if residual:
                        lanes = lanes + load(before + column * size)
                    store(place + column * size, lanes)
                else:
                    if residual:
                        lanes = lanes + load_part(before + column * size, count)
                    store_part(place + column * size, lanes, count)

    return output


def _make_gate(dtype: str, tiles: bool, activation: str) -> Any:
    """Store the gated activation of a group's sums, a panel of gate and one of up."""
    _, _, store, store_part, size = row_access(dtype)
    gated = make_gated(activation)

    @helper
    def gate_and_up(arguments, sums, rows, first_row, panel, num_outputs):
        limit, out = float_of_bits(argument(arguments, 15)), argument(arguments, 11)
        repeated = _repeated_rows(rows) if tiles else 0
        column = panel // 2 * 16
        for row in range(rows):
            own = sums + (row + (repeated if row >= rows // TILE_ROWS * TILE_ROWS else 0)) * SUM_STRIDE
            gate = _add_bias(arguments, load_f32(own), panel * 16)
            up = _add_bias(arguments, load_f32(own + LINE), panel * 16 + 16)
            if limit != 0.0:
                gate, up = limited_gate(gate, limit), limited_up(up, limit)
            product = gated(gate, up)
            place = out + (first_row + row) * argument(arguments, 12) + column * size
            if num_outputs - column >= 16:
                store(place, product)
            else:
                store_part(place, product, num_outputs - column)

    return gate_and_up


@inlined
def _repeated_rows(rows):
    """How many rows the last tile of AMX repeats of the tile before."""
    return TILE_ROWS - rows % TILE_ROWS if rows > TILE_ROWS else 0

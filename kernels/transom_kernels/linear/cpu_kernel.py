"""The CPU kernel `linear`: x @ weight.T over packed weights, then bias, scale, cap, residual or activation in float32, then one
rounding. `cpu.py` launches it.

- method: the instructions that multiply rows by panels (`layout.py`).
- group: the two panels that are multiplied together; in a gated weight they are a panel of gate and one of up.
- step: the part of K that one multiplication takes from a panel (`layout.STEP_BYTES`).
- block: the rows of a work item. If K is long, a block is multiplied by several groups one *chunk* of K (some steps) after the
  other, so that the chunk of its rows stays in the second-level cache.

Legend: M rows, K input width, N output width.
"""

from typing import Any

from transom_kernels.cpu.language import helper, inlined
from transom_kernels.cpu.layer_output import make_store_gated, make_store_output
from transom_kernels.cpu.simd import LOAD, LOAD_LANES, NUM_BYTES, STORE, float_argument, load_f32, splat
from transom_kernels.cpu.tiles import CONFIG_BYTES, configure_tiles, make_tile_product, release_tiles
from transom_kernels.cpu.work import argument, claim, finish, row_address, scratch
from transom_kernels.linear.cpu import AT
from transom_kernels.linear.layout import GROUPS_OF_CHUNK, LINE, OUTPUTS, STEP_BYTES, TILE_ROWS, VECTOR_TILES
from transom_kernels.linear.vector_product import make_vector_product

SUM_STRIDE = 2 * LINE  # bytes from row to row of a group's sums: 16 float32 of each of two panels


def make_linear(method: str, dtype: str, out_dtype: str, activation: str | None, registers: int) -> Any:
    """Build the kernel: out = residual + cap(scale * (x @ weight.T + bias)).

    With an activation, out = activation(x @ gate.T + bias) * (x @ up.T + bias). A work item is a block of rows and several groups.
    """
    product = _make_tiles() if method == "tiles" else _make_vectors(method, dtype, registers)
    copy_rows = _make_copy(method, dtype)
    tiles, step_bytes = method == "tiles", STEP_BYTES[method]
    store_group = _make_gate(out_dtype, tiles, activation) if activation else _make_output(out_dtype, tiles)
    step_of_x = {"tiles": 64, "pairs": 4, "wide": 4 if dtype == "f32" else 8}[method]

    @helper
    def whole_rows(arguments, x, x_stride, first_row, rows, first, last, sums):
        """Multiply a block of rows by the panels [first, last), with all of K at once: 32 rows at a time, the last 47 or fewer."""
        panel, num_panels = argument(arguments, AT.panel_bytes), argument(arguments, AT.num_panels)
        for p in range(first, last, 2):
            weight = argument(arguments, AT.panels) + p * panel
            other = weight + panel if p + 1 < num_panels else weight
            row = 0
            while row < rows:
                count = rows - row
                # 47 rows or fewer are taken at once: a last AMX tile of fewer than 16 rows repeats rows of the tile before it
                if count >= 3 * TILE_ROWS:
                    count = 2 * TILE_ROWS
                product(x + row * x_stride, x_stride, count, weight, other, panel // step_bytes, sums, 0)
                store_group(arguments, sums, count, first_row + row, p)
                row += count

    @helper
    def chunks_of_rows(arguments, x, x_stride, first_row, rows, first, last, sums):
        """Multiply a block of rows by the panels [first, last): GROUPS_OF_CHUNK groups at a time, chunk after chunk of K."""
        panel, num_panels = argument(arguments, AT.panel_bytes), argument(arguments, AT.num_panels)
        num_steps, chunk = panel // step_bytes, argument(arguments, AT.chunk_steps)
        sums_of_group = (argument(arguments, AT.block_rows) + TILE_ROWS) * SUM_STRIDE
        for begin in range(first, last, 2 * GROUPS_OF_CHUNK):
            end = min(begin + 2 * GROUPS_OF_CHUNK, last)
            for step in range(0, num_steps, chunk):
                here, count = x + step * step_of_x, min(chunk, num_steps - step)
                for p in range(begin, end, 2):
                    weight = argument(arguments, AT.panels) + p * panel + step * step_bytes
                    other = weight + panel if p + 1 < num_panels else weight
                    own_sums = sums + (p - begin) // 2 * sums_of_group
                    product(here, x_stride, rows, weight, other, count, own_sums, 1 if step else 0)
            for p in range(begin, end, 2):
                store_group(arguments, sums + (p - begin) // 2 * sums_of_group, rows, first_row, p)

    def linear(arguments, thread):
        item = claim(thread)
        memory = scratch(thread)
        copied, configured = -1, 0
        while item >= 0:
            num_panels, per_item = argument(arguments, AT.num_panels), argument(arguments, AT.groups_of_item)
            items_of_block = (num_panels + 2 * per_item - 1) // (2 * per_item)
            block = argument(arguments, AT.block_rows)
            first_row, part = item // items_of_block * block, item % items_of_block
            rows = min(block, argument(arguments, AT.num_rows) - first_row)
            x, x_stride = row_address(arguments, AT.x, first_row), argument(arguments, AT.x.stride)
            if argument(arguments, AT.own_stride):
                own, own_stride = memory + argument(arguments, AT.own_offset), argument(arguments, AT.own_stride)
                if copied != first_row:  # a thread copies a block once for all consecutive items of it
                    copy_rows(arguments, x, x_stride, rows, own, own_stride)
                    copied = first_row
                x, x_stride = own, own_stride
            if tiles and configured != min(rows, TILE_ROWS):
                configured = min(rows, TILE_ROWS)
                configure_tiles(memory, configured)
            first, last = 2 * part * per_item, min(2 * (part + 1) * per_item, num_panels)
            sums = memory + CONFIG_BYTES
            if argument(arguments, AT.panel_bytes) // step_bytes <= argument(arguments, AT.chunk_steps):
                whole_rows(arguments, x, x_stride, first_row, rows, first, last, sums)
            else:
                chunks_of_rows(arguments, x, x_stride, first_row, rows, first, last, sums)
            finish(thread)
            item = claim(thread)
        if tiles and configured:
            release_tiles()

    return linear


def _make_tiles() -> Any:
    """Build the product by AMX. All tiles have equally many rows, so the last one may repeat rows of the tile before it."""
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
    """Build the product in vector registers: tiles of as many rows as fit into them, then one tile of few rows or of one."""
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
    """Build the product of up to `most` rows and two panels: both panels at once, or one after the other if `panels` is 1."""
    tile = make_vector_product(most, panels, dtype, pairs=pairs)

    @helper
    def both(x, x_stride, rows, weight, other, num_steps, out, adds):
        tile(x, x_stride, rows, (weight, other), num_steps, out, SUM_STRIDE, adds)

    @helper
    def in_turn(x, x_stride, rows, weight, other, num_steps, out, adds):
        tile(x, x_stride, rows, (weight,), num_steps, out, SUM_STRIDE, adds)
        tile(x, x_stride, rows, (other,), num_steps, out + LINE, SUM_STRIDE, adds)

    return both if panels == 2 else in_turn


def _make_copy(method: str, dtype: str) -> Any:
    """Build copy_rows, which copies rows of x into scratch: padded with zeros, and in float32 for the wide method."""
    load, size = LOAD_LANES[dtype], NUM_BYTES[dtype]
    stored = "f32" if method == "wide" else dtype
    store, own_size = STORE[stored], NUM_BYTES[stored]

    @helper
    def copy_rows(arguments, x, x_stride, rows, own, own_stride):
        width = argument(arguments, AT.width)
        for row in range(rows):
            source, target = x + row * x_stride, own + row * own_stride
            k = 0
            while k < width:
                store(target + k * own_size, load(source + k * size, width - k))
                k += 16
            while k * own_size < own_stride - LINE:  # the weights are padded to whole steps
                store(target + k * own_size, splat(0.0))
                k += 16

    return copy_rows


def _make_output(dtype: str, tiles: bool) -> Any:
    """Build store_group(arguments, sums, rows, first row, first panel), which stores the outputs of two panels."""
    load, store, size = LOAD[dtype], STORE[dtype], NUM_BYTES[dtype]
    store_output = make_store_output(dtype, AT.output)
    place_of_sums = _make_place_of_sums(tiles)

    @helper
    def output(arguments, sums, rows, first_row, panel):
        at, column, num_outputs = AT.output, panel * OUTPUTS, argument(arguments, AT.output.num_outputs)
        residual, is_plain = argument(arguments, at.residual.tensor), argument(arguments, at.bias) == 0
        is_plain &= float_argument(arguments, at.soft_cap) == 0.0 and float_argument(arguments, at.scale) == 1.0
        is_plain &= column + 2 * OUTPUTS <= num_outputs
        for row in range(rows):
            own = place_of_sums(sums, row, rows)
            if is_plain:
                x, y = load_f32(own), load_f32(own + LINE)
                if residual:
                    before = row_address(arguments, at.residual, first_row + row) + column * size
                    x, y = x + load(before), y + load(before + OUTPUTS * size)
                place = row_address(arguments, at.out, first_row + row) + column * size
                store(place, x)
                store(place + OUTPUTS * size, y)
            else:
                store_output(arguments, load_f32(own), first_row + row, column)
                if column + OUTPUTS < num_outputs:
                    store_output(arguments, load_f32(own + LINE), first_row + row, column + OUTPUTS)

    return output


def _make_gate(dtype: str, tiles: bool, activation: str) -> Any:
    """Build store_group(arguments, sums, rows, first row, first panel): it stores activations of a panel of gate and one of up."""
    store_gated = make_store_gated(dtype, activation, AT.output)
    place_of_sums = _make_place_of_sums(tiles)

    @helper
    def gate_and_up(arguments, sums, rows, first_row, panel):
        for row in range(rows):
            own = place_of_sums(sums, row, rows)
            store_gated(arguments, load_f32(own), load_f32(own + LINE), first_row + row, panel // 2 * OUTPUTS)

    return gate_and_up


def _make_place_of_sums(tiles: bool) -> Any:
    """Build place_of_sums(sums, row, rows), the address of a row's sums. With AMX a last tile that is not full begins with rows of
    the tile before it, whose sums come first."""

    @inlined
    def place_of_sums(sums, row, rows):
        repeated = 0
        if tiles and rows > TILE_ROWS and row >= rows // TILE_ROWS * TILE_ROWS:
            repeated = TILE_ROWS - rows % TILE_ROWS
        return sums + (row + repeated) * SUM_STRIDE

    return place_of_sums

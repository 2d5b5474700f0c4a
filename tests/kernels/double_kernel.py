"""Kernels for tests of the runtime: out[i] = 2 * x[i], one item for each 16 numbers; and one that cannot be compiled."""

from transom_kernels.cpu.language import helper
from transom_kernels.cpu.simd import load_part_f32, splat, store_i64, store_part_f32
from transom_kernels.cpu.work import argument, each_item


def make_division():
    """A kernel with a function that raises an exception with a computed message."""

    @helper
    def share(x, y):
        if y == 0:
            raise ValueError(x)
        return x // y

    @each_item
    def divide(arguments, thread, item):
        store_i64(argument(arguments, 0), share(argument(arguments, 1), argument(arguments, 2)))

    return divide


def make_double():
    """Arguments: x, out, number of elements."""

    @each_item
    def double(arguments, thread, item):
        count = min(16, argument(arguments, 2) - 16 * item)
        x, out = argument(arguments, 0) + 64 * item, argument(arguments, 1) + 64 * item
        store_part_f32(out, load_part_f32(x, count) * splat(2.0), count)

    return double

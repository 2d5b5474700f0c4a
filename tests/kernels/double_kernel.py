"""A kernel for tests of the runtime: out[i] = 2 * x[i], one item for each 16 numbers."""

from transom_kernels.cpu.simd import load_part_f32, splat, store_part_f32
from transom_kernels.cpu.work import argument, claim, finish


def make_double():
    """Arguments: x, out, number of elements."""

    def double(arguments, thread):
        item = claim(thread)
        while item >= 0:
            count = min(16, argument(arguments, 2) - 16 * item)
            x, out = argument(arguments, 0) + 64 * item, argument(arguments, 1) + 64 * item
            store_part_f32(out, load_part_f32(x, count) * splat(2.0), count)
            finish(thread)
            item = claim(thread)

    return double

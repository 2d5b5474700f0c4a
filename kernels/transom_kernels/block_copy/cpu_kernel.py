"""The CPU kernel of block copies, in numba: target blocks[target of i] = source blocks[source of i]. `cpu.py` launches it."""

from __future__ import annotations

from typing import Any

from transom_kernels.cpu.simd import load_i64, load_u8, load_words, store_u8, store_words
from transom_kernels.cpu.work import argument, claim, finish


def make_copy_blocks() -> Any:
    """An item is a part of one block.

    Arguments: 0 source blocks, 1 sources [copies] int64, 2 targets [copies] int64, 3 bytes of a block, 4 stride of the source
    blocks in bytes, 5 bytes of an item, a multiple of 64, 6 target blocks, 7 their stride in bytes.
    """

    def copy_blocks(arguments, thread):  # type: ignore[no-untyped-def]
        item = claim(thread)
        while item >= 0:
            num_bytes, step = argument(arguments, 3), argument(arguments, 5)
            parts = (num_bytes + step - 1) // step
            copy, first = item // parts, item % parts * step
            last = min(first + step, num_bytes)
            full = last // 64 * 64
            source = argument(arguments, 0) + load_i64(argument(arguments, 1) + copy * 8) * argument(arguments, 4)
            target = argument(arguments, 6) + load_i64(argument(arguments, 2) + copy * 8) * argument(arguments, 7)
            for at in range(first, full, 64):
                store_words(target + at, load_words(source + at))
            for at in range(max(first, full), last):
                store_u8(target + at, load_u8(source + at))
            finish(thread)
            item = claim(thread)

    return copy_blocks

"""Copies of KV cache blocks on CPUs: target[t] = source[s] for each pair of block ids (s, t)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import launch
from transom_kernels.cpu.simd import load_i64, load_u8, load_words, store_u8, store_words
from transom_kernels.cpu.work import argument, each_item

ITEM_BYTES = 32 << 10  # bytes of a block that one work item copies


def copy_blocks_cpu(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy `source[s]` to `target[t]` for each pair (s, t), all at once: no copy may read or write what another copy writes.

    `source` and `target` are [ids, bytes] of uint8 with contiguous rows of equal length; they may be the same tensor.
    """
    if not pairs:
        return
    sources, targets = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
    num_bytes = source.shape[1]
    launch(
        cpu_kernel("transom_kernels.block_copy.cpu", "make_copy_blocks"),
        len(pairs) * -(-num_bytes // ITEM_BYTES),
        [source, sources, targets, num_bytes, source.stride(0), ITEM_BYTES, target, target.stride(0)],
    )


def make_copy_blocks() -> Any:
    """Build the kernel. A work item is a part of one block.

    Arguments: 0 source blocks, 1 sources [copies] int64, 2 targets [copies] int64, 3 bytes of a block, 4 stride of the source
    blocks in bytes, 5 bytes of an item, a multiple of 64, 6 target blocks, 7 their stride in bytes.
    """

    @each_item
    def copy_blocks(arguments, thread, item):
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

    return copy_blocks

"""The Triton kernel that copies whole blocks: target[target_ids[c]] = source[source_ids[c]] for each copy c.

Source and target may lie in any memory that the device can address, pinned host memory included.

Legend: C copies, W 32-bit words of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["source_ids", "target_ids"])  # alignment of `target_ids` depends on C
def copy_words(
    source,  # [ids, W] of int32
    target,  # [ids, W]
    source_ids,  # [C] int64
    target_ids,  # [C] int64
    source_stride,  # words from block to block
    target_stride,  # words from block to block
    num_words,
    BLOCK_W: tl.constexpr,
):
    """Copy `BLOCK_W` words of one block. The grid is (C, blocks of W)."""
    copy = tl.program_id(0)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = w < num_words
    from_block = source + tl.load(source_ids + copy) * source_stride
    to_block = target + tl.load(target_ids + copy) * target_stride
    tl.store(to_block + w, tl.load(from_block + w, mask=inside), mask=inside)

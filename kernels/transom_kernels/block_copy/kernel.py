"""Copies of whole blocks in Triton, between any two places that the device reaches (pinned host memory too).

Legend: C copies, W words of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["source_ids", "target_ids"])  # the second lies where the number of copies puts it
def copy_words(
    source,  # [ids, W] of int32
    target,  # [ids, W]
    source_ids,  # [C] int64
    target_ids,  # [C] int64
    source_stride,  # words
    target_stride,
    num_words,
    BLOCK_W: tl.constexpr,
):
    """`BLOCK_W` words of one block."""
    copy = tl.program_id(0)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = w < num_words
    begin = source + tl.load(source_ids + copy) * source_stride
    end = target + tl.load(target_ids + copy) * target_stride
    tl.store(end + w, tl.load(begin + w, mask=inside), mask=inside)

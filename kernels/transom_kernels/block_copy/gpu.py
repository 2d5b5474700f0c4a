"""Copies KV cache blocks on GPUs: one launch performs a batch of copies, none of which reads or writes what another one writes.

Legend: C copies, W 32-bit words of a block.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

WORDS = 2048  # 32-bit words that one program copies: 8 KiB


def copy_blocks_triton(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy `source[s]` to `target[t]` for each pair (s, t), all at once: no copy may read or write what another copy writes.

    `source` and `target` are [ids, bytes] of uint8: a row is one block, contiguous and a multiple of 4 bytes wide. They may be the
    same tensor, the cache's memory and a staging buffer, or a GPU's memory and pinned host memory.
    """
    if not pairs:
        return
    words = [rows.view(torch.int32) for rows in (source, target)]
    # the kernel cannot read ids in plain host memory
    device = target.device if source.device.type == "cpu" else source.device
    ids = torch.tensor(pairs, dtype=torch.int64).T.contiguous().to(device, non_blocking=True)
    num_words = words[0].shape[1]
    copy_words[(len(pairs), -(-num_words // WORDS))](
        *words, ids[0], ids[1], words[0].stride(0), words[1].stride(0), num_words, BLOCK_W=WORDS, num_warps=8
    )


# Triton compiles a kernel again for a pointer with another alignment. `target_ids` begins 8 C bytes after `source_ids`, so its
# alignment would vary with C.
@triton.jit(do_not_specialize=["source_ids", "target_ids"])
def copy_words(
    source,  # [ids, W] of int32, in any memory that the device can address, pinned host memory included
    target,  # [ids, W] of int32, in any such memory
    source_ids,  # [C] int64
    target_ids,  # [C] int64
    source_stride,  # words from block to block
    target_stride,  # words from block to block
    num_words,  # W
    BLOCK_W: tl.constexpr,
):
    """Copy `BLOCK_W` words of one KV block: target[target_ids[c]] = source[source_ids[c]]. The grid is (C, ceil(W / BLOCK_W))."""
    copy = tl.program_id(0)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = w < num_words
    from_block = source + tl.load(source_ids + copy) * source_stride
    to_block = target + tl.load(target_ids + copy) * target_stride
    tl.store(to_block + w, tl.load(from_block + w, mask=inside), mask=inside)

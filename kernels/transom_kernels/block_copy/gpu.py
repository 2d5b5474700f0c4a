"""Launches of the block copy kernel: one launch for copies that do not depend on each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_kernels.block_copy.kernel import copy_words

WORDS = 2048  # 32-bit words that a program copies: 8 KiB


def copy_blocks_triton(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """`target[t] = source[s]` for each pair (s, t), all at once: no copy may read a block that another copy writes.

    `source` and `target` are [ids, bytes] of uint8. Rows are contiguous and a multiple of 4 bytes wide. The two may be one tensor,
    the cache's memory and a staging buffer, or a GPU's memory and pinned host memory.
    """
    if not pairs:
        return
    words = [rows.view(torch.int32) for rows in (source, target)]
    device = (
        target.device if source.device.type == "cpu" else source.device
    )  # the kernel cannot read ids in plain host memory
    ids = torch.tensor(pairs, dtype=torch.int64).T.contiguous().to(device, non_blocking=True)
    num_words = words[0].shape[1]
    copy_words[(len(pairs), -(-num_words // WORDS))](
        *words, ids[0], ids[1], words[0].stride(0), words[1].stride(0), num_words, BLOCK_W=WORDS, num_warps=8
    )

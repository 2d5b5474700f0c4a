"""Block copies on a device: one launch for all that do not wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_kernels.block_copy.kernel import copy_words

WORDS = 2048  # of a program: 8 KiB


def copy_blocks_triton(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """`target[t] = source[s]` for each (s, t), at once: no copy may read what another writes.

    Both are [ids, bytes] of uint8, whole words wide, rows in one piece; one may be the slab and the other a staging area.
    """
    if not pairs:
        return
    words = [rows.view(torch.int32) for rows in (source, target)]
    ids = torch.tensor(pairs, dtype=torch.int64).T.contiguous().to(target.device, non_blocking=True)
    num_words = words[0].shape[1]
    copy_words[(len(pairs), -(-num_words // WORDS))](
        *words, ids[0], ids[1], words[0].stride(0), words[1].stride(0), num_words, BLOCK_W=WORDS, num_warps=8
    )

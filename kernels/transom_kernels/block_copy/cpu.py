"""Launch of the CPU kernel of block copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import launch

ITEM_BYTES = 32 << 10  # of a block that one item of work copies


def copy_blocks_cpu(blocks: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """`blocks[t] = blocks[s]` for each pair (s, t), all at once: no copy may read or write a block that another copy writes.

    `blocks` is [ids, bytes] of uint8 with contiguous rows.
    """
    if not pairs:
        return
    sources, targets = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
    num_bytes = blocks.shape[1]
    launch(
        cpu_kernel("transom_kernels.block_copy.cpu_kernel", "make_copy_blocks"),
        len(pairs) * -(-num_bytes // ITEM_BYTES),
        [blocks, sources, targets, num_bytes, blocks.stride(0), ITEM_BYTES],
    )

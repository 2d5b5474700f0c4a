"""Launch of the CPU kernel of block copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import launch

ITEM_BYTES = 32 << 10  # of a block that one item of work copies


def copy_blocks_cpu(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """`target[t] = source[s]` for each pair (s, t), all at once: no copy may read or write a block that another copy writes.

    `source` and `target` are [ids, bytes] of uint8 with contiguous rows of equal length; the two may be one tensor.
    """
    if not pairs:
        return
    sources, targets = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
    num_bytes = source.shape[1]
    launch(
        cpu_kernel("transom_kernels.block_copy.cpu_kernel", "make_copy_blocks"),
        len(pairs) * -(-num_bytes // ITEM_BYTES),
        [source, sources, targets, num_bytes, source.stride(0), ITEM_BYTES, target, target.stride(0)],
    )

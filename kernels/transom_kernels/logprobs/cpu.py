"""Launches of the log-probability kernel for CPUs.

Legend: L rows, V vocabulary, K likely tokens, P pieces of a row.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import empty, launch

BLOCK = 64  # ids of a block, which has a maximum
PIECE_BLOCKS = 128  # blocks of a piece, which is an item of work
AREA_BYTES = 4 * PIECE_BLOCKS + 24  # of a piece's summary

_zeros = [torch.zeros(64, dtype=torch.int64)]  # the last one is in use; a recorded program may still use an earlier one


def logprobs_cpu(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contract is that of `op.logprobs`; the results are those of `RowLogprobs`."""
    num_rows, num_ids = logits.shape
    num_pieces = -(-num_ids // (BLOCK * PIECE_BLOCKS))
    shape = (num_rows, 1 + num_top)
    ids, logprobs, ranks = empty(shape, torch.int64), empty(shape, torch.float32), empty(shape, torch.int64)
    if len(_zeros[-1]) < num_rows:
        _zeros.append(torch.zeros(2 * num_rows, dtype=torch.int64))
    launch(
        cpu_kernel("transom_kernels.logprobs.cpu_kernel", "make_logprobs"),
        num_rows * num_pieces,
        [
            logits, logits.stride(0) * 4, num_ids, chosen.contiguous(), num_top, ids, logprobs, ranks,
            empty((num_rows * num_pieces * AREA_BYTES,), torch.uint8), num_pieces, _zeros[-1],
        ],
    )  # fmt: skip
    return ids, logprobs, ranks

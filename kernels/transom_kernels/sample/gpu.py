"""Launches of the sampling kernels: `apply_logit_changes` if there are changes, then `block_maxima` and `sample_rows`.

Legend: S rows, V vocabulary, B blocks of 64 token ids, C chunks of a row.
"""

from __future__ import annotations

import torch

from transom_kernels.sample.block_maxima import block_maxima
from transom_kernels.sample.kernel import apply_logit_changes, sample_rows
from transom_kernels.sample.params import NOISE_BLOCK, SampleParams

PROGRAM_BLOCKS = (
    32  # of a `block_maxima` program, which is one warp: each thread computes the largest noise of one block
)
ROUND_BLOCKS = 16  # blocks whose ids are read at once
READ_BLOCKS = 2048  # block summaries that are read at once
READ_CHUNKS = 256  # chunk sums that are read at once
LISTED_IDS = 4096  # places in a row's list of candidate ids; at least COMPARED_IDS plus the ids of ROUND_BLOCKS
COMPARED_IDS = 512  # ids of a top-k list that are compared with each other
CHANGES = 256  # logit changes of a program


def sample_triton(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """The contract is that of `op.sample`."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if params.change_row is not None and len(params.change_row):
        count = len(params.change_row)
        apply_logit_changes[(-(-count // CHANGES),)](
            logits, params.change_row, params.change_id, params.change_factor, params.change_minus, logits.stride(0), count,
            BLOCK_C=CHANGES,
        )  # fmt: skip
    if len(logits):
        _sample_rows(logits, params, out)
    return out


def _sample_rows(logits: torch.Tensor, params: SampleParams, out: torch.Tensor) -> None:
    num_rows, num_ids = logits.shape
    num_blocks = -(-num_ids // NOISE_BLOCK)
    num_chunks = -(-num_blocks // PROGRAM_BLOCKS)
    # Separate tensors: Triton recompiles for a tensor that does not begin at a multiple of 16 bytes, as slices of one tensor may.
    maxima, noisiest, max_noise = (logits.new_empty(num_rows, num_blocks) for _ in range(3))
    chunk_sums = logits.new_empty(num_rows, num_chunks, 2)
    lists = torch.empty(num_rows, num_blocks + LISTED_IDS, dtype=torch.int32, device=logits.device)
    block_maxima[(num_chunks, num_rows)](
        logits, params.temperature, params.top_k, params.top_p, params.keys, maxima, noisiest, max_noise, chunk_sums,
        num_ids, logits.stride(0), num_blocks,
        BLOCKS=PROGRAM_BLOCKS, num_warps=1,
    )  # fmt: skip
    sample_rows[(num_rows,)](
        logits, params.temperature, params.top_k, params.top_p, params.min_p, params.keys,
        maxima, noisiest, max_noise, chunk_sums, lists, out, num_ids, logits.stride(0), num_blocks, num_chunks,
        BLOCK_B=READ_BLOCKS, BLOCK_C=READ_CHUNKS, BLOCK_L=LISTED_IDS, ROUND=ROUND_BLOCKS,
        KEPT=COMPARED_IDS, num_warps=8,
    )  # fmt: skip

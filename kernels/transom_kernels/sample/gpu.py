"""Launches of the sampling kernels."""

from __future__ import annotations

import torch

from transom_kernels.sample.block_maxima import block_maxima
from transom_kernels.sample.kernel import apply_logit_changes, sample_rows
from transom_kernels.sample.params import NOISE_BLOCK, SampleParams

PROGRAM_BLOCKS = 32  # of a program, which is one warp: a thread has the noise of one block
ROUND_BLOCKS = 16  # whose ids are looked at together
READ_BLOCKS = 2048  # of what the block_maxima wrote, at a time
READ_CHUNKS = 256
LISTED_IDS = 4096  # that may win, at a time; no less than those that are kept and those of a round
COMPARED_IDS = 512  # that are compared with each other
CHANGES = 256  # of a program


def sample_triton(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """See `op.sample`."""
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
    # Of their own each: Triton compiles anew where a tensor begins at no multiple of 16 bytes, as parts of one tensor may.
    maxima, lucky, noise = (logits.new_empty(num_rows, num_blocks) for _ in range(3))
    weights = logits.new_empty(num_rows, num_chunks, 2)
    lists = torch.empty(num_rows, num_blocks + LISTED_IDS, dtype=torch.int32, device=logits.device)
    block_maxima[(num_chunks, num_rows)](
        logits, params.temperature, params.top_k, params.top_p, params.keys, maxima, lucky, noise, weights,
        num_ids, logits.stride(0), num_blocks,
        BLOCKS=PROGRAM_BLOCKS, num_warps=1,
    )  # fmt: skip
    sample_rows[(num_rows,)](
        logits, params.temperature, params.top_k, params.top_p, params.min_p, params.keys,
        maxima, lucky, noise, weights, lists, out, num_ids, logits.stride(0), num_blocks, num_chunks,
        BLOCK_B=READ_BLOCKS, BLOCK_C=READ_CHUNKS, BLOCK_L=LISTED_IDS, ROUND=ROUND_BLOCKS,
        KEPT=COMPARED_IDS, num_warps=8,
    )  # fmt: skip

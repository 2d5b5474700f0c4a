"""Launches of the sampling kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from transom_kernels.launch import next_power_of_two
from transom_kernels.sample.kernel import change_logits, sample_rows

if TYPE_CHECKING:
    from transom_kernels.sample.op import SampleParams

MOST_IDS = 4096  # of a round
SEARCH_IDS = 1024  # each against sixteen thresholds
CHANGES = 256  # of a program


def sample_triton(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """See `op.sample`."""
    num_rows, num_ids = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if params.change_row is not None and len(params.change_row):
        count = len(params.change_row)
        change_logits[(-(-count // CHANGES),)](
            logits, params.change_row, params.change_id, params.change_factor, params.change_minus, logits.stride(0), count,
            BLOCK_C=CHANGES,
        )  # fmt: skip
    block = min(MOST_IDS, next_power_of_two(num_ids))
    if num_rows:
        sample_rows[(num_rows,)](
            logits, params.temperature, params.top_k, params.top_p, params.min_p, params.keys, out, num_ids, logits.stride(0),
            BLOCK_N=block, BLOCK_SEARCH=min(block, SEARCH_IDS), num_warps=8,
        )  # fmt: skip
    return out

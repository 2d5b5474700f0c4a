"""Samples all rows by the operator `sample`, where the CPU kernel does not: one call with the parameters of the step's rows.

Legend: S rows that are sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.sample import SampleParams, sample
from transom_worker.sampling.sequence_state import SequenceState, noise_keys
from transom_worker.sampling.token_table import RowPairs

MAX_TOP_K = 2**31 - 1  # larger than any vocabulary; a request may ask for an even larger number
ROW_MULTIPLE = 4  # the number of rows is padded to a multiple, so that each array begins at a multiple of 16 bytes


def sample_fused(logits_SV: torch.Tensor, states: Sequence[SequenceState], penalties: RowPairs | None) -> torch.Tensor:
    """Return the token of each row, int64 [S], on the device. Bias and bans must be in the logits already; `penalties` must not,
    and are written into the logits here.
    """
    return sample(logits_SV, _params(states, penalties, logits_SV.device))


def sampling_words(states: Sequence[SequenceState]) -> NDArray[np.int64]:
    """Return all rows' sampling parameters as one array: noise keys, then temperature, top_p, min_p and top_k of 4 bytes each."""
    num_rows, params = len(states), [state.params for state in states]
    width = _width(num_rows)
    words = np.zeros(3 * width, dtype=np.int64)
    floats = words[width:].view(np.float32).reshape(4, width)
    words[:num_rows] = noise_keys(states)
    floats[0, :num_rows] = [0.0 if p.greedy else p.temperature for p in params]
    floats[1, :num_rows] = [p.top_p for p in params]
    floats[2, :num_rows] = [p.min_p for p in params]
    floats[3].view(np.int32)[:num_rows] = [min(max(0, p.top_k), MAX_TOP_K) for p in params]
    return words


def _params(states: Sequence[SequenceState], penalties: RowPairs | None, device: torch.device) -> SampleParams:
    """Return all rows' sampling parameters on the device, in one copy."""
    num_rows, width = len(states), _width(len(states))
    device_words = torch.from_numpy(sampling_words(states)).to(device, non_blocking=True)
    temperature, top_p, min_p, top_k = (
        row[:num_rows] for row in device_words[width:].view(torch.float32).view(4, width)
    )
    return SampleParams(
        temperature=temperature,
        top_k=top_k.view(torch.int32),
        top_p=top_p,
        min_p=min_p,
        keys=device_words[:num_rows],
        change_row=None if penalties is None else penalties.row,
        change_id=None if penalties is None else penalties.token,
        change_factor=None if penalties is None else penalties.row_value,
        change_minus=None if penalties is None else penalties.value,
    )


def _width(num_rows: int) -> int:
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE

"""Sampling in one launch for all rows, whatever they ask for, where logits lie on a device that Triton's kernels run on.

Legend: S rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from transom_kernels.sample import SampleParams, sample
from transom_worker.sampling.adjustments import penalties
from transom_worker.sampling.sequence_state import SequenceState, noise_keys

MOST_IDS = 2**31 - 1  # more than any vocabulary; a request may ask for more still
WORDS = 4  # rows of parameters are padded to so many, so that each array begins at a multiple of 16 bytes whatever S is


def sample_fused(logits_SV: torch.Tensor, states: Sequence[SequenceState]) -> list[int]:
    """The token of each row; biases and bans are in the logits, penalties are not yet. May change the logits of rows with any.

    Reading the ids is the one place where the host waits for the device.
    """
    ids: list[int] = sample(logits_SV, _params(states, logits_SV.device)).tolist()
    return ids


def _params(states: Sequence[SequenceState], device: torch.device) -> SampleParams:
    """All rows' parameters, in one copy to the device."""
    num_rows, params = len(states), [state.params for state in states]
    width = -(-num_rows // WORDS) * WORDS
    packed = np.zeros(3 * width, dtype=np.int64)  # keys, then four arrays of half the size
    floats = packed[width:].view(np.float32).reshape(4, width)
    packed[:num_rows] = noise_keys(states)
    floats[0, :num_rows] = [0.0 if p.greedy else p.temperature for p in params]
    floats[1, :num_rows] = [p.top_p for p in params]
    floats[2, :num_rows] = [p.min_p for p in params]
    floats[3].view(np.int32)[:num_rows] = [min(max(0, p.top_k), MOST_IDS) for p in params]
    there = torch.from_numpy(packed).to(device, non_blocking=True)
    temperature, top_p, min_p, top_k = (row[:num_rows] for row in there[width:].view(torch.float32).view(4, width))
    changes = penalties(states, device)
    return SampleParams(
        temperature=temperature,
        top_k=top_k.view(torch.int32),
        top_p=top_p,
        min_p=min_p,
        keys=there[:num_rows],
        change_row=None if changes is None else changes.row,
        change_id=None if changes is None else changes.token,
        change_factor=None if changes is None else changes.factor,
        change_minus=None if changes is None else changes.minus,
    )

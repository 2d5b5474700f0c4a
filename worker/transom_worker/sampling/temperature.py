"""Divides logits by temperature, and puts the rows' noise keys on the logits' device.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_worker.sampling.sequence_state import SequenceState, noise_keys


def apply_temperature(logits_NV: torch.Tensor, states: Sequence[SequenceState]) -> torch.Tensor:
    """Return each row divided by its temperature; `logits_NV` itself where all temperatures are 1."""
    if all(state.params.temperature == 1.0 for state in states):
        return logits_NV
    temperatures = torch.tensor([state.params.temperature for state in states], dtype=logits_NV.dtype)
    return logits_NV / temperatures.to(logits_NV.device)[:, None]


def noise_key_tensor(logits_NV: torch.Tensor, states: Sequence[SequenceState]) -> torch.Tensor:
    """Return the noise key of each row on the logits' device, int64 [N, 1]."""
    return torch.from_numpy(noise_keys(states)).to(logits_NV.device)[:, None]

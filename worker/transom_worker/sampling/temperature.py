"""What temperature and noise need of each row.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_worker.sampling.sequence_state import SequenceState
from transom_worker.sampling.sequence_state import noise_keys as row_keys


def apply_temperature(logits_NV: torch.Tensor, states: Sequence[SequenceState]) -> torch.Tensor:
    """Each row over its temperature; `logits_NV` itself where all are 1."""
    if all(state.params.temperature == 1.0 for state in states):
        return logits_NV
    temperatures = torch.tensor([state.params.temperature for state in states], dtype=logits_NV.dtype)
    return logits_NV / temperatures.to(logits_NV.device)[:, None]


def noise_keys(logits_NV: torch.Tensor, states: Sequence[SequenceState]) -> torch.Tensor:
    """The keys of each row's noise, int64 [N, 1]."""
    return torch.from_numpy(row_keys(states)).to(logits_NV.device)[:, None]

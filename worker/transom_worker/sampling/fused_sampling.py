"""Samples all rows with one call of the operator `sample`, on devices without the CPU kernel of `record_sampling`.

Legend: S rows that are sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.sample import SampleParams, sample
from transom_worker.sampling.sequence_state import SequenceState
from transom_worker.sampling.token_table import RowPairs
from transom_worker.uploads import Arrays, Uploads

MAX_TOP_K = 2**31 - 1  # larger than any vocabulary, so larger requests can be cut to it


def sample_fused(logits_SV: torch.Tensor, arrays: Arrays, penalties: RowPairs | None, uploads: Uploads) -> torch.Tensor:
    """Return the token of each row, int64 [S], on the device; `arrays` are the rows' keys and `fixed_arrays`.

    The logits must already contain bias and bans, but not `penalties`: this call writes those into the logits.
    """
    rows: dict[str, Any] = uploads.tensors(arrays)
    if penalties is None:
        return sample(logits_SV, SampleParams(**rows))
    changes = SampleParams(
        **rows,
        change_row=penalties.row,
        change_id=penalties.token,
        change_factor=penalties.row_value,
        change_minus=penalties.value,
    )
    return sample(logits_SV, changes)


def fixed_arrays(states: Sequence[SequenceState]) -> dict[str, NDArray[Any]]:
    """Return the sampling parameters of all rows that no step changes, by the field names of `SampleParams`."""
    params = [state.params for state in states]
    return {
        "temperature": np.array([0.0 if p.greedy else p.temperature for p in params], dtype=np.float32),
        "top_p": np.array([p.top_p for p in params], dtype=np.float32),
        "min_p": np.array([p.min_p for p in params], dtype=np.float32),
        "top_k": np.array([min(max(0, p.top_k), MAX_TOP_K) for p in params], dtype=np.int32),
    }

"""The arguments that `policy_attention` and `add_block_mass` pass to their implementations, and the check that they fit together.

Legend: T query tokens, H query heads, D key width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.paged_attention.inputs import AttentionInputs
from transom_kernels.policy_attention.batch import PolicyBatch


@dataclass(slots=True, kw_only=True)
class PolicyInputs(AttentionInputs):
    """Queries and caches (`AttentionInputs`), compact block tables, and two tensors that only some policies need."""

    batch: PolicyBatch
    sink_q: torch.Tensor | None = None  # [T, H, D]: multiplied with the keys of sink tokens instead of q
    statistics: torch.Tensor | None = None  # [T, H, 2] float32: maximum (base 2) and sum of each row's softmax

    def check(self) -> None:
        """Raise ValueError unless shapes, dtypes and options fit together."""
        super(PolicyInputs, self).check()
        for name, value, shape in (
            ("sink_q", self.sink_q, self.q.shape),
            ("statistics", self.statistics, (*self.q.shape[:2], 2)),
        ):
            if value is not None and tuple(value.shape) != tuple(shape):
                raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {tuple(shape)}.")

"""The specification of `position_scale`, in torch.

Legend: T tokens.
"""

from __future__ import annotations

import torch


def position_scale_reference(
    positions: torch.Tensor, *, factor: float, interval: int, dtype: torch.dtype
) -> torch.Tensor:
    """The contract is that of `op.position_scale`."""
    intervals_T = ((positions.float() + 1.0) / interval).floor()
    return (intervals_T.log1p() * factor + 1.0).to(dtype)

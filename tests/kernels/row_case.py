"""Rows of numbers for the tests of CPU kernels, and how near to torch's their results are."""

from __future__ import annotations

from typing import Any

import torch


def strided(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows in the middle of wider rows of NaN."""
    wide = torch.full((rows, width + 5), float("nan"))
    wide[:, 2 : width + 2] = torch.randn(rows, width)
    return wide.to(dtype)[:, 2 : width + 2]


def limit(dtype: torch.dtype, *, exact: float = 1e-5, atol: float = 1e-3) -> dict[str, Any]:
    """A rounding of the dtype; in float32, where sums have another order, `exact`."""
    if dtype == torch.float32:
        return {"rtol": exact, "atol": exact}
    return {"rtol": 2**-10 if dtype == torch.float16 else 2**-7, "atol": atol}

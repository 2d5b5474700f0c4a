"""Operations on whole rows, each in the fastest way on its device: numpy's vectorised operations on CPUs, torch's elsewhere.

Legend: R rows, V columns, N selected elements, C columns of the fullest row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def take_rows(values_RV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the rows with these ascending numbers; a view where the numbers are consecutive."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return values_RV[rows[0] : rows[-1] + 1]
    return values_RV[torch.tensor(rows, device=values_RV.device)]


def first_argmax(values_RV: torch.Tensor) -> torch.Tensor:
    """Return the lowest index of each row's largest value, int64 [R]."""
    if values_RV.device.type == "cpu":
        return torch.from_numpy(values_RV.numpy().argmax(-1))
    return values_RV.max(-1).indices


def sort_descending(values_RV: torch.Tensor) -> torch.Tensor:
    """Return each row's values, largest first."""
    if values_RV.device.type == "cpu":
        return torch.from_numpy(-np.sort(-values_RV.numpy(), axis=-1))
    return values_RV.sort(-1, descending=True).values


def entries_at_least(values_RV: torch.Tensor, bound_R1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column [N] of every value that reaches its row's bound and is not -inf, row by row."""
    if values_RV.device.type == "cpu":
        values, bound = values_RV.numpy(), bound_R1.numpy()
        flat = np.flatnonzero(values >= np.maximum(bound, np.finfo(values.dtype).min))
        rows, columns = np.divmod(flat, values.shape[1])
        return torch.from_numpy(rows), torch.from_numpy(columns)
    row_N, column_N = ((values_RV >= bound_R1) & (values_RV > -torch.inf)).nonzero(as_tuple=True)
    return row_N, column_N


def packed_columns(row_N: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, int]:
    """Return each element's number within its row [N], and the largest count C, at least 1. `row_N` must ascend.

    With these, elements are written to [R, C], packed to the left: rows [0, 0, 2] have numbers [0, 1, 0], and C is 2.
    """
    lengths = torch.bincount(row_N, minlength=num_rows)
    first = lengths.cumsum(0) - lengths
    return torch.arange(len(row_N), device=row_N.device) - first[row_N], max(1, int(lengths.max()))

"""Operations on whole rows by the fastest way on each device: numpy's vectorised ones on CPUs, torch's elsewhere.

Legend: R rows, V columns, N set elements, C columns of the fullest row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def take_rows(values_RV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Different rows, ascending; a view where they follow each other."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return values_RV[rows[0] : rows[-1] + 1]
    return values_RV[torch.tensor(rows, device=values_RV.device)]


def first_argmax(values_RV: torch.Tensor) -> torch.Tensor:
    """The lowest index of each row's largest value, int64 [R]."""
    if values_RV.device.type == "cpu":
        return torch.from_numpy(values_RV.numpy().argmax(-1))
    return values_RV.max(-1).indices


def sort_descending(values_RV: torch.Tensor) -> torch.Tensor:
    """Each row's values, largest first."""
    if values_RV.device.type == "cpu":
        return torch.from_numpy(-np.sort(-values_RV.numpy(), axis=-1))
    return values_RV.sort(-1, descending=True).values


def count_greater(values_RV: torch.Tensor, bound_R1: torch.Tensor) -> torch.Tensor:
    """How many values of each row exceed its bound, int64 [R]."""
    if values_RV.device.type == "cpu":
        return torch.from_numpy(np.count_nonzero(values_RV.numpy() > bound_R1.numpy(), axis=-1))
    return (values_RV > bound_R1).sum(-1)


def at_least(values_RV: torch.Tensor, bound_R1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column [N] of every value that reaches its row's bound and is not -inf, row by row."""
    if values_RV.device.type == "cpu":
        values, bound = values_RV.numpy(), bound_R1.numpy()
        flat = np.flatnonzero(values >= np.maximum(bound, np.finfo(values.dtype).min))
        rows, columns = np.divmod(flat, values.shape[1])
        return torch.from_numpy(rows), torch.from_numpy(columns)
    row_N, column_N = ((values_RV >= bound_R1) & (values_RV > -torch.inf)).nonzero(as_tuple=True)
    return row_N, column_N


def packed_columns(row_N: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, int]:
    """For ascending rows, each element's place in its row [N], and C, at least 1: where to lay them out as [R, C]."""
    lengths = torch.bincount(row_N, minlength=num_rows)
    first = lengths.cumsum(0) - lengths
    return torch.arange(len(row_N), device=row_N.device) - first[row_N], max(1, int(lengths.max()))

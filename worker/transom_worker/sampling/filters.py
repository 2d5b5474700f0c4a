"""top_k, top_p and min_p as cut-off values, and the candidates that they leave.

Legend: R rows, V vocabulary, C candidates of the widest row.

Every filter keeps "all tokens at least as likely as x", so equal logits stay or go together and no order of ties matters.
top_p is taken over what top_k left, renormalised; min_p relative to the most likely token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(slots=True, kw_only=True)
class Filters:
    """The filters of R rows, each a list [R]: `top_k` 0 or less, `top_p` 1 and `min_p` 0 are off."""

    top_k: list[int]
    top_p: list[float]
    min_p: list[float]


@dataclass(slots=True, kw_only=True)
class Candidates:
    """What filters left, ids ascending in each row; padding has id 0 and logit -inf."""

    token_ids_RC: torch.Tensor  # int64
    logits_RC: torch.Tensor  # as given, -inf where filtered out


def filter_logits(logits_RV: torch.Tensor, filters: Filters) -> Candidates:
    """Candidates of each row of tempered logits. Overwrites `logits_RV`."""
    vocab_size = logits_RV.shape[1]
    _cut_top_k(logits_RV, [min(k, vocab_size) if k > 0 else 0 for k in filters.top_k])
    probs_RV = logits_RV.softmax(-1)
    top_p_R1 = _column(filters.top_p, probs_RV)
    least_R1 = probs_RV.amax(-1, keepdim=True).to(torch.float64) * _column(filters.min_p, probs_RV)
    # A token under (1 - p) / V is outside the nucleus: all such tokens together weigh less than 1 - p.
    floor_R1 = torch.maximum(least_R1, (1.0 - top_p_R1) / vocab_size * (1.0 - 1e-6)).to(probs_RV.dtype)
    row, token = _where((probs_RV >= floor_R1) & (logits_RV > -torch.inf))
    column, width = _columns(row, len(probs_RV))
    probs_RC = probs_RV.new_zeros(len(probs_RV), width)
    probs_RC[row, column] = probs_RV[row, token]
    kept_RC = probs_RC >= torch.maximum(_top_p_cut(probs_RC, top_p_R1), least_R1)
    token_ids_RC = torch.zeros(probs_RC.shape, dtype=torch.int64, device=probs_RC.device)
    token_ids_RC[row, column] = token
    candidates_RC = torch.full_like(probs_RC, -torch.inf)
    candidates_RC[row, column] = logits_RV[row, token]
    return Candidates(token_ids_RC=token_ids_RC, logits_RC=candidates_RC.masked_fill_(~kept_RC, -torch.inf))


def _cut_top_k(logits_RV: torch.Tensor, top_k: list[int]) -> None:
    widest = max(top_k)
    if widest == 0:
        return
    best_RK = logits_RV.topk(widest, -1).values
    index_R1 = torch.tensor([max(k - 1, 0) for k in top_k], device=logits_RV.device)[:, None]
    cut_R1 = best_RK.gather(1, index_R1)
    off_R1 = torch.tensor([k == 0 for k in top_k], device=logits_RV.device)[:, None]
    logits_RV.masked_fill_((logits_RV < cut_R1) & ~off_R1, -torch.inf)


def _top_p_cut(probs_RC: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """The least probability inside each row's nucleus, float64 [R, 1]; 0 where top_p is off."""
    sorted_RC = _sort_descending(probs_RC).to(torch.float64)
    mass_before_RC = sorted_RC.cumsum(-1) - sorted_RC
    inside_RC = mass_before_RC < top_p_R1
    cut_R1 = sorted_RC.masked_fill(~inside_RC, torch.inf).amin(-1, keepdim=True)
    return cut_R1.masked_fill(top_p_R1 >= 1.0, 0.0)


def _sort_descending(values_RC: torch.Tensor) -> torch.Tensor:
    if values_RC.device.type != "cpu":
        return values_RC.sort(-1, descending=True).values
    return torch.from_numpy(-np.sort(-values_RC.numpy(), axis=-1))  # vectorised; torch's CPU sort is ten times slower


def _where(mask_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every set element, row by row."""
    if mask_RV.device.type != "cpu":
        row, token = mask_RV.nonzero(as_tuple=True)
        return row, token
    flat = torch.from_numpy(np.flatnonzero(mask_RV.numpy()))
    return flat // mask_RV.shape[1], flat % mask_RV.shape[1]


def _columns(row: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, int]:
    """The place of each element of ascending `row` inside its row, and the widest row."""
    lengths = torch.bincount(row, minlength=num_rows)
    first = lengths.cumsum(0) - lengths
    return torch.arange(len(row), device=row.device) - first[row], max(1, int(lengths.max()))


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]

"""top_k, top_p and min_p as cut-off values, and the candidates that they leave.

Legend: R rows, V vocabulary, N candidates, C candidates of the widest row.

Every filter keeps "all tokens at least as likely as x", so equal logits stay or go together and no order of ties matters.
top_p is taken over what top_k left, renormalised; min_p relative to the most likely token. A first cut over whole rows only
has to keep enough; the exact one is made over the few candidates, by sums whose order does not depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_worker.sampling.row_ops import at_least, first_argmax, packed_columns, sort_descending


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
    """Candidates of each row of tempered logits."""
    best_R1 = logits_RV.gather(1, first_argmax(logits_RV)[:, None])
    log_total_R1 = _log_total(logits_RV, best_R1, filters)
    token_ids_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device).expand(logits_RV.shape)
    first = _pack(token_ids_RV, logits_RV, _first_cut(logits_RV, best_R1, log_total_R1, filters))
    weights_RC = (first.logits_RC - best_R1).exp_().to(torch.float64)
    nucleus_R1 = _top_p_cut(weights_RC, (log_total_R1 - best_R1).exp(), filters)
    cut_R1 = torch.maximum(nucleus_R1, _column(filters.min_p, logits_RV))
    first.logits_RC.masked_fill_(weights_RC < cut_R1, -torch.inf)
    if min(filters.top_p) >= 1.0:
        return first
    return _pack(first.token_ids_RC, first.logits_RC, torch.full_like(best_R1, -torch.inf))


def _pack(token_ids_RV: torch.Tensor, logits_RV: torch.Tensor, cut_R1: torch.Tensor) -> Candidates:
    """Only what reaches its row's cut, side by side."""
    row, place = at_least(logits_RV, cut_R1)
    column, width = packed_columns(row, len(logits_RV))
    token_ids_RC = torch.zeros(len(logits_RV), width, dtype=torch.int64, device=logits_RV.device)
    token_ids_RC[row, column] = token_ids_RV[row, place]
    logits_RC = logits_RV.new_full(token_ids_RC.shape, -torch.inf)
    logits_RC[row, column] = logits_RV[row, place]
    return Candidates(token_ids_RC=token_ids_RC, logits_RC=logits_RC)


def _log_total(logits_RV: torch.Tensor, best_R1: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The logarithm of each row's summed weights, float64 [R, 1]; infinite for rows whose top_p does not need it."""
    total_R1 = torch.full_like(best_R1, torch.inf, dtype=torch.float64)
    rows = [row for row, p in enumerate(filters.top_p) if p < 1.0 and filters.top_k[row] <= 0]
    if rows:
        index = torch.tensor(rows, device=logits_RV.device)
        part = logits_RV if len(rows) == len(logits_RV) else logits_RV[index]
        logprobs = part.log_softmax(-1)  # unlike a sum, it treats each row alike whatever the batch
        best = logprobs.gather(1, first_argmax(part)[:, None])
        total_R1[index] = best_R1[index].to(torch.float64) - best.to(torch.float64)
    return total_R1


def _first_cut(
    logits_RV: torch.Tensor, best_R1: torch.Tensor, log_total_R1: torch.Tensor, filters: Filters
) -> torch.Tensor:
    """The least logit that can stay, [R, 1]: the k-th; or where the tail of top_p or min_p certainly begins."""
    vocab_size = logits_RV.shape[1]
    # A token under (1 - p) / V is outside the nucleus: all such tokens together weigh less than 1 - p.
    tail_R1 = log_total_R1 + ((1.0 - _column(filters.top_p, logits_RV)) / vocab_size).log_()
    tail_R1.masked_fill_(log_total_R1.isinf(), -torch.inf)
    least_R1 = best_R1 + _column(filters.min_p, logits_RV).log_()
    top_k = [min(k, vocab_size) if k > 0 else 0 for k in filters.top_k]
    has_top_k_R1 = torch.tensor([k > 0 for k in top_k], device=logits_RV.device)[:, None]
    cut_R1 = torch.maximum(tail_R1, least_R1 - 1e-4).masked_fill_(has_top_k_R1, -torch.inf).to(logits_RV.dtype)
    if max(top_k) == 0:
        return cut_R1 - 1e-5 * cut_R1.abs()
    best_RK = logits_RV.topk(max(top_k), -1).values
    index_R1 = torch.tensor([max(k - 1, 0) for k in top_k], device=logits_RV.device)[:, None]
    return torch.where(has_top_k_R1, best_RK.gather(1, index_R1), cut_R1 - 1e-5 * cut_R1.abs())


def _top_p_cut(weights_RC: torch.Tensor, total_R1: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The least weight inside each row's nucleus, float64 [R, 1]; 0 where top_p is off."""
    if min(filters.top_p) >= 1.0:
        return torch.zeros_like(total_R1)
    top_p_R1 = _column(filters.top_p, weights_RC)
    sorted_RC = sort_descending(weights_RC)
    mass_RC = sorted_RC.cumsum(-1)
    total_R1 = torch.where(total_R1.isinf(), mass_RC[:, -1:], total_R1)  # after top_k: what is left
    outside_RC = mass_RC - sorted_RC >= top_p_R1 * total_R1
    cut_R1 = sorted_RC.masked_fill_(outside_RC, torch.inf).amin(-1, keepdim=True)
    return cut_R1.masked_fill_(top_p_R1 >= 1.0, 0.0)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]

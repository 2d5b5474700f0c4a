"""top_k, top_p and min_p, each as the least logit that stays, and the candidates that they leave.

Legend: R rows, V vocabulary, C candidates of the widest row.

Every filter keeps "all tokens at least as likely as x", so equal logits stay or go together and no order of ties matters.
top_p is taken over what top_k left, renormalised; min_p relative to the most likely token. No row's cut depends on another
row: sums run in order over sorted values, whose number may differ by batch only in a tail of nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_worker.sampling.row_ops import at_least, first_argmax, packed_columns, sort_descending

LIKELY_TAIL = 1e-4  # a nucleus seldom holds tokens below this probability; looking there first makes the sort short


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
    logits_RC: torch.Tensor  # as given


def filter_logits(logits_RV: torch.Tensor, filters: Filters) -> Candidates:
    """Candidates of each row of apply_temperature logits."""
    best_R1 = logits_RV.gather(1, first_argmax(logits_RV)[:, None])
    cut_R1 = _top_k_cut(logits_RV, filters.top_k)
    nucleus = [row for row, p in enumerate(filters.top_p) if p < 1.0]
    least_R1 = best_R1 + _column(filters.min_p, logits_RV).log_()
    if nucleus:
        index = torch.tensor(nucleus, device=logits_RV.device)
        top_p_N1 = _column([filters.top_p[row] for row in nucleus], logits_RV)
        part = logits_RV if len(nucleus) == len(logits_RV) else logits_RV[index]
        cut_R1[index] = _top_p_cut(part, best_R1[index], cut_R1[index], top_p_N1)
    return _pack(logits_RV, torch.maximum(cut_R1, least_R1.to(logits_RV.dtype)))


def _top_k_cut(logits_RV: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """Each row's k-th largest logit, [R, 1]; -inf where top_k is off or larger than the vocabulary."""
    vocab_size = logits_RV.shape[1]
    wanted = [k if 0 < k < vocab_size else 0 for k in top_k]
    cut_R1 = logits_RV.new_full((len(top_k), 1), -torch.inf)
    if not any(wanted):
        return cut_R1
    best_RK = logits_RV.topk(max(wanted), -1).values
    index_R1 = torch.tensor([max(k - 1, 0) for k in wanted], device=logits_RV.device)[:, None]
    off_R1 = torch.tensor([k == 0 for k in wanted], device=logits_RV.device)[:, None]
    return best_RK.gather(1, index_R1).masked_fill_(off_R1, -torch.inf)


def _top_p_cut(
    logits_RV: torch.Tensor, best_R1: torch.Tensor, top_k_cut_R1: torch.Tensor, top_p_R1: torch.Tensor
) -> torch.Tensor:
    """The least logit inside each row's nucleus, [R, 1]."""
    vocab_size = logits_RV.shape[1]
    log_total_R1 = _log_total(logits_RV, top_k_cut_R1)
    cut_R1, reached_R1 = _cut_above(LIKELY_TAIL, logits_RV, best_R1, top_k_cut_R1, top_p_R1, log_total_R1)
    rows = (~reached_R1[:, 0]).nonzero()[:, 0]
    if len(rows):
        # Tokens under (1 - p) / V are outside the nucleus: all of them together weigh less than 1 - p.
        tail_R1 = (1.0 - top_p_R1[rows]) / vocab_size
        arguments = (tensor[rows] for tensor in (logits_RV, best_R1, top_k_cut_R1, top_p_R1, log_total_R1))
        cut_R1[rows], _ = _cut_above(tail_R1, *arguments)
    return cut_R1


def _cut_above(
    tail: float | torch.Tensor,
    logits_RV: torch.Tensor,
    best_R1: torch.Tensor,
    top_k_cut_R1: torch.Tensor,
    top_p_R1: torch.Tensor,
    log_total_R1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nucleus's least logit among tokens of probability `tail` and more, and whether these reach p; both [R, 1]."""
    tail_R1 = (log_total_R1 + torch.as_tensor(tail, dtype=torch.float64).log()).to(logits_RV.dtype)
    has_top_k_R1 = top_k_cut_R1 > -torch.inf
    sorted_RC = sort_descending(_pack(logits_RV, torch.where(has_top_k_R1, top_k_cut_R1, tail_R1)).logits_RC)
    weights_RC = (sorted_RC - best_R1).exp_().to(torch.float64)
    mass_RC = weights_RC.cumsum(-1)
    total_R1 = torch.where(has_top_k_R1, mass_RC[:, -1:], (log_total_R1 - best_R1).exp_())
    wanted_R1 = top_p_R1 * total_R1
    outside_RC = mass_RC - weights_RC >= wanted_R1
    return sorted_RC.masked_fill_(outside_RC, torch.inf).amin(-1, keepdim=True), mass_RC[:, -1:] >= wanted_R1


def _log_total(logits_RV: torch.Tensor, top_k_cut_R1: torch.Tensor) -> torch.Tensor:
    """The logarithm of each row's summed weights, float64 [R, 1]; 0 where top_k makes it useless."""
    total_R1 = torch.zeros_like(top_k_cut_R1, dtype=torch.float64)
    rows = top_k_cut_R1[:, 0].isinf().nonzero()[:, 0]
    if len(rows):
        part = logits_RV if len(rows) == len(logits_RV) else logits_RV[rows]
        best_N1 = first_argmax(part)[:, None]
        logprobs = part.log_softmax(-1)  # unlike a sum, it treats each row alike whatever the batch
        total_R1[rows] = part.gather(1, best_N1).to(torch.float64) - logprobs.gather(1, best_N1)
    return total_R1


def _pack(logits_RV: torch.Tensor, cut_R1: torch.Tensor) -> Candidates:
    """What reaches its row's cut, side by side."""
    row, token = at_least(logits_RV, cut_R1)
    column, width = packed_columns(row, len(logits_RV))
    token_ids_RC = torch.zeros(len(logits_RV), width, dtype=torch.int64, device=logits_RV.device)
    token_ids_RC[row, column] = token
    logits_RC = logits_RV.new_full(token_ids_RC.shape, -torch.inf)
    logits_RC[row, column] = logits_RV[row, token]
    return Candidates(token_ids_RC=token_ids_RC, logits_RC=logits_RC)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]

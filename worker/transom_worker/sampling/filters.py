"""The filters top_k, top_p and min_p: each gives the lowest logit that it keeps, and together they leave a row's candidates.

Every filter keeps all tokens that are at least as likely as some bound. So tokens with equal logits are kept or removed
together, and the order of ties does not matter. top_p applies to what top_k left, renormalised; min_p is relative to the most
likely token. A row's bounds do not depend on other rows: sums run in order over sorted values, and only the length of a tail of
zeros depends on the batch.

- nucleus: the most likely tokens whose probabilities add up to top_p.

Legend: R rows, V vocabulary, C candidates of the row that has most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_worker.sampling.row_ops import entries_at_least, first_argmax, packed_columns, sort_descending


@dataclass(slots=True, kw_only=True)
class Filters:
    """The filters of R rows, each a list [R]. A filter is off where `top_k` is 0 or less, `top_p` is 1, or `min_p` is 0."""

    top_k: list[int]
    top_p: list[float]
    min_p: list[float]


@dataclass(slots=True, kw_only=True)
class Candidates:
    """The tokens that the filters left, ids ascending in each row. Padding has id 0 and logit -inf."""

    token_ids_RC: torch.Tensor  # int64
    logits_RC: torch.Tensor  # as given


def filter_logits(logits_RV: torch.Tensor, filters: Filters) -> Candidates:
    """Return the candidates of each row; the logits are divided by temperature already."""
    best_R1 = logits_RV.gather(1, first_argmax(logits_RV)[:, None])
    bound_R1 = _top_k_bound(logits_RV, filters.top_k)
    nucleus = [row for row, p in enumerate(filters.top_p) if p < 1.0]
    min_p_bound_R1 = best_R1 + _column(filters.min_p, logits_RV).log_()
    if nucleus:
        index = torch.tensor(nucleus, device=logits_RV.device)
        top_p_N1 = _column([filters.top_p[row] for row in nucleus], logits_RV)
        part_logits = logits_RV if len(nucleus) == len(logits_RV) else logits_RV[index]
        bound_R1[index] = _top_p_bound(part_logits, best_R1[index], bound_R1[index], top_p_N1)
    return _pack(logits_RV, torch.maximum(bound_R1, min_p_bound_R1.to(logits_RV.dtype)))


def _top_k_bound(logits_RV: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """Return each row's k-th largest logit, [R, 1]; -inf where top_k is off or larger than the vocabulary."""
    vocab_size = logits_RV.shape[1]
    requested = [k if 0 < k < vocab_size else 0 for k in top_k]
    bound_R1 = logits_RV.new_full((len(top_k), 1), -torch.inf)
    if not any(requested):
        return bound_R1
    best_RK = logits_RV.topk(max(requested), -1).values
    index_R1 = torch.tensor([max(k - 1, 0) for k in requested], device=logits_RV.device)[:, None]
    off_R1 = torch.tensor([k == 0 for k in requested], device=logits_RV.device)[:, None]
    return best_RK.gather(1, index_R1).masked_fill_(off_R1, -torch.inf)


def _top_p_bound(
    logits_RV: torch.Tensor, best_R1: torch.Tensor, top_k_bound_R1: torch.Tensor, top_p_R1: torch.Tensor
) -> torch.Tensor:
    """Return the lowest logit inside each row's nucleus, [R, 1].

    Sorting is costly, so only tokens are sorted that can be in the nucleus. Tokens of probability below (1 - p) / V cannot: all of
    them together weigh less than 1 - p.
    """
    log_total_R1 = _log_total(logits_RV, top_k_bound_R1)
    tail_R1 = (log_total_R1 + ((1.0 - top_p_R1) / logits_RV.shape[1]).log()).to(logits_RV.dtype)
    has_top_k_R1 = top_k_bound_R1 > -torch.inf
    sorted_RC = sort_descending(_pack(logits_RV, torch.where(has_top_k_R1, top_k_bound_R1, tail_R1)).logits_RC)
    weights_RC = (sorted_RC - best_R1).exp_().to(torch.float64)
    mass_RC = weights_RC.cumsum(-1)
    total_R1 = torch.where(has_top_k_R1, mass_RC[:, -1:], (log_total_R1 - best_R1).exp_())
    outside_RC = mass_RC - weights_RC >= top_p_R1 * total_R1  # the tokens before one already reach top_p
    return sorted_RC.masked_fill_(outside_RC, torch.inf).amin(-1, keepdim=True)


def _log_total(logits_RV: torch.Tensor, top_k_bound_R1: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of each row's sum of weights, float64 [R, 1]; 0 where top_k is on and the sum is not needed."""
    total_R1 = torch.zeros_like(top_k_bound_R1, dtype=torch.float64)
    rows = top_k_bound_R1[:, 0].isinf().nonzero()[:, 0]
    if len(rows):
        part_logits = logits_RV if len(rows) == len(logits_RV) else logits_RV[rows]
        best_N1 = first_argmax(part_logits)[:, None]
        logprobs = part_logits.log_softmax(-1)  # unlike a sum, it treats each row alike in any batch
        total_R1[rows] = part_logits.gather(1, best_N1).to(torch.float64) - logprobs.gather(1, best_N1)
    return total_R1


def _pack(logits_RV: torch.Tensor, bound_R1: torch.Tensor) -> Candidates:
    """Return the tokens that reach their row's bound, packed to the left."""
    row, token = entries_at_least(logits_RV, bound_R1)
    column, width = packed_columns(row, len(logits_RV))
    token_ids_RC = torch.zeros(len(logits_RV), width, dtype=torch.int64, device=logits_RV.device)
    token_ids_RC[row, column] = token
    logits_RC = logits_RV.new_full(token_ids_RC.shape, -torch.inf)
    logits_RC[row, column] = logits_RV[row, token]
    return Candidates(token_ids_RC=token_ids_RC, logits_RC=logits_RC)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]

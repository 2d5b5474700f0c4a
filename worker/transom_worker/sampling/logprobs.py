"""Log-probabilities and ranks of chosen and likely tokens, from raw logits: before bias, penalties, temperature and filters.

Legend: L rows that ask for log-probabilities, V vocabulary, K alternatives.
"""

from __future__ import annotations

import torch

from transom_worker.contract import Logprob, TokenLogprobs
from transom_worker.sampling.row_ops import count_greater

MAX_ROWS_PER_PASS = 64  # limits the memory that a long prompt's log-probabilities take


def token_logprobs(logits_LV: torch.Tensor, chosen: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Return, for each row, the chosen token's natural log-probability and rank, and its `num_top` most likely tokens, best
    first.

    A rank is one plus the number of tokens with a strictly larger logit.
    """
    result: list[TokenLogprobs] = []
    for first in range(0, len(chosen), MAX_ROWS_PER_PASS):
        part = slice(first, first + MAX_ROWS_PER_PASS)
        result += _logprobs_of_rows(logits_LV[part], chosen[part], num_top[part])
    return result


def _logprobs_of_rows(logits_LV: torch.Tensor, chosen: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    logprobs_LV = logits_LV.to(torch.float32).log_softmax(-1)
    chosen_L1 = torch.tensor(chosen, device=logits_LV.device)[:, None]
    chosen_logprobs = logprobs_LV.gather(1, chosen_L1)[:, 0].tolist()
    ranks = (count_greater(logits_LV, logits_LV.gather(1, chosen_L1)) + 1).tolist()
    width = min(max(num_top), logits_LV.shape[1])
    top_LK = (
        logits_LV.topk(width, -1).indices.sort(-1).values
    )  # ids ascending, so that the stable sort orders ties by id
    top_logits_LK, order_LK = logits_LV.gather(1, top_LK).sort(dim=-1, descending=True, stable=True)
    top_LK = top_LK.gather(1, order_LK)
    ids, logprobs = top_LK.tolist(), logprobs_LV.gather(1, top_LK).tolist()
    top_ranks = _ranks(top_logits_LK.tolist())
    return [
        TokenLogprobs(
            chosen=Logprob(chosen[row], chosen_logprobs[row], ranks[row]),
            top=tuple(Logprob(*entry) for entry in zip(ids[row][:k], logprobs[row], top_ranks[row], strict=False)),
        )
        for row, k in enumerate(num_top)
    ]


def _ranks(sorted_logits: list[list[float]]) -> list[list[int]]:
    """Return ranks inside rows of descending values; equal values share the best rank."""
    return [[row.index(value) + 1 for value in row] for row in sorted_logits]

"""Computes log-probabilities and ranks of the chosen and the likeliest tokens from raw logits.

Raw logits are those before bias, penalties, temperature and filters.

Legend: L rows that request log-probabilities, V vocabulary, K alternatives.
"""

from itertools import islice

import torch

from transom_core.contract import Logprob, LogprobTable, TokenLogprobs
from transom_kernels.logprobs import logprobs

# Limits the memory that a long prompt's log-probabilities take: 64 rows of 150,000 float32 logits are 38 MB.
MAX_ROWS_PER_PASS = 64


def token_logprobs(logits_LV: torch.Tensor, chosen: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Return, for each row, the natural log-probability and rank of the chosen token and of the row's `num_top` likeliest tokens,
    best first. A rank is one plus the number of tokens with a strictly larger logit."""
    result: list[TokenLogprobs] = []
    for first in range(0, len(chosen), MAX_ROWS_PER_PASS):
        part = slice(first, first + MAX_ROWS_PER_PASS)
        result += _logprobs_of_rows(logits_LV[part], chosen[part], num_top[part])
    return result


def logprob_table(logits_LV: torch.Tensor, chosen: list[int], num_top: int) -> LogprobTable:
    """Return the result of `token_logprobs` as a table; every row has the same `num_top`."""
    table = LogprobTable(1 + num_top)
    for first in range(0, len(chosen), MAX_ROWS_PER_PASS):
        part = slice(first, first + MAX_ROWS_PER_PASS)
        chosen_L = torch.tensor(chosen[part], device=logits_LV.device)
        ids, values, ranks = logprobs(logits_LV[part], chosen_L, num_top)
        columns = (ids.to(torch.int32), values.to(torch.float32), ranks.to(torch.int32))
        table.extend_columns(ids.shape[1], *(column.cpu().contiguous().numpy() for column in columns))
    return table


def _logprobs_of_rows(logits_LV: torch.Tensor, chosen: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    chosen_L = torch.tensor(chosen, device=logits_LV.device)
    columns = (column.tolist() for column in logprobs(logits_LV, chosen_L, max(num_top)))
    result = []
    for k, *row in zip(num_top, *columns, strict=True):
        first, *top = (Logprob(*entry) for entry in islice(zip(*row, strict=True), 1 + k))
        result.append(TokenLogprobs(chosen=first, top=tuple(top)))
    return result

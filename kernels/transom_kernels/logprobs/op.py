"""The operator `logprobs`: log-probability and rank of each row's chosen token and of its most likely tokens.

Legend: L rows, V vocabulary, K likely tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transom_kernels.launch import uses_cpu_kernels
from transom_kernels.logprobs.reference import logprobs_reference


class RowLogprobs(NamedTuple):
    """The chosen token of each row in column 0, then its K most likely tokens, best first; the lowest id first of equal logits.

    A rank is one plus the number of tokens with a strictly larger logit.
    """

    ids: torch.Tensor  # [L, 1 + K] int64
    logprobs: torch.Tensor  # [L, 1 + K] float32, natural logarithms
    ranks: torch.Tensor  # [L, 1 + K] int64


def logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> RowLogprobs:
    """Return the log-probabilities of `chosen` [L] int64 and of the K = min(`num_top`, V) most likely tokens of `logits` [L, V].

    Raises:
        ValueError: shapes do not fit.
    """
    if logits.dim() != 2 or not logits.shape[1] or chosen.shape != (len(logits),):
        raise ValueError(
            f"logits {tuple(logits.shape)} and chosen {tuple(chosen.shape)}: give [rows, vocabulary], [rows]."
        )
    num_top = min(num_top, logits.shape[1])
    if uses_cpu_kernels(logits) and logits.dtype == torch.float32 and logits.stride(1) == 1:
        from transom_kernels.logprobs.cpu import logprobs_cpu

        return RowLogprobs(*logprobs_cpu(logits, chosen, num_top))
    return RowLogprobs(*logprobs_reference(logits, chosen, num_top))

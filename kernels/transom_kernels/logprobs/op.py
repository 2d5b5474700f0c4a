"""The operator `logprobs`: log-probabilities and ranks of each row's chosen token and of its most likely tokens.

Legend: L rows, V vocabulary, K likely tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transom_kernels.launch import uses_cpu_kernels


class RowLogprobs(NamedTuple):
    """Column 0 is each row's chosen token; the others are its K most likely tokens, best first, equal logits by ascending id.

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


def logprobs_reference(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the fields of `RowLogprobs`: the specification of `logprobs`, in torch."""
    logprobs = logits.to(torch.float32).log_softmax(-1)
    top = logits.topk(num_top, -1).indices.sort(-1).values  # ids ascending, so that the stable sort orders ties by id
    top = top.gather(1, logits.gather(1, top).sort(dim=-1, descending=True, stable=True).indices)
    top_logits, chosen_logits = logits.gather(1, top), logits.gather(1, chosen[:, None])
    num_above_top = (top_logits[:, None, :] > top_logits[:, :, None]).sum(-1)
    num_above_chosen = (logits > chosen_logits).sum(-1, keepdim=True)
    ids = torch.cat([chosen[:, None], top], 1)
    return ids, logprobs.gather(1, ids), torch.cat([num_above_chosen, num_above_top], 1) + 1

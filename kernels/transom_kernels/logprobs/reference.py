"""Log-probabilities by torch: the specification of `logprobs`, and what computes it where there is no kernel.

Legend: L rows, V vocabulary, K likely tokens.
"""

from __future__ import annotations

import torch


def logprobs_reference(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contract is that of `op.logprobs`; the results are those of `RowLogprobs`."""
    logprobs = logits.to(torch.float32).log_softmax(-1)
    top = logits.topk(num_top, -1).indices.sort(-1).values  # ids ascending, so that the stable sort orders ties by id
    top = top.gather(1, logits.gather(1, top).sort(dim=-1, descending=True, stable=True).indices)
    top_logits, chosen_logits = logits.gather(1, top), logits.gather(1, chosen[:, None])
    num_above_top = (top_logits[:, None, :] > top_logits[:, :, None]).sum(-1)
    num_above_chosen = (logits > chosen_logits).sum(-1, keepdim=True)
    ids = torch.cat([chosen[:, None], top], 1)
    return ids, logprobs.gather(1, ids), torch.cat([num_above_chosen, num_above_top], 1) + 1

"""The operator `sample`: logits to one token id per row, by penalties, temperature, top-k, top-p, min-p and seeded Gumbel noise.

Legend: S rows, V vocabulary, C changes to logits.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import uses_triton
from transom_kernels.sample.params import SampleParams
from transom_kernels.sample.reference import sample_reference


def sample(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """Sample one token id of each row of `logits` [S, V] float32; returns [S] int64.

    `params` gives each row's logit changes, temperature, top_k, top_p, min_p and noise key. Changes are applied to `logits` in
    place. top_p counts the probability that top_k left; min_p is relative to the most likely token; equal logits are kept or
    removed together. Of equal scores the lowest id wins. A row whose scores are all -inf or NaN still gets an id.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    rows = len(logits)
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"logits are {tuple(logits.shape)} {logits.dtype}; give [rows, vocabulary] in float32.")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits of a row lie {logits.stride(1)} apart; give rows that are contiguous.")
    for name in ("temperature", "top_k", "top_p", "min_p", "keys"):
        if getattr(params, name).shape != (rows,):
            raise ValueError(
                f"{name} has shape {tuple(getattr(params, name).shape)}; give one for each of {rows} rows."
            )
    if uses_triton(logits):
        from transom_kernels.sample.gpu import sample_triton

        return sample_triton(logits, params)
    return sample_reference(logits, params)

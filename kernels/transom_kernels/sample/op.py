"""The sampling operators `sample` and `best_of_slice`.

`sample` picks one token id per row of logits, by penalties, temperature, top-k, top-p, min-p and seeded Gumbel noise. CUDA devices
compute it with Triton, others in torch; the engine's own path on CPUs is `cpu.sample_records`.
`best_of_slice` does a tensor-parallel rank's part, if each rank has the logits of a slice of the vocabulary.

Legend: S rows, V vocabulary, C changes to logits.
"""

import torch

from transom_kernels.launch import implementation, uses_triton
from transom_kernels.sample.reference import SampleParams, best_of_slice_reference, sample_reference


def sample(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """Sample one token id for each row of `logits` [S, V] float32; return [S] int64.

    `params` gives each row's logit changes, temperature, top_k, top_p, min_p and noise key. Changes are applied to `logits` in
    place. top_p is a share of the probability that top_k has left; min_p is relative to the most likely token; tokens with equal
    logits are kept or removed together. Of equal scores the lowest id wins. A row whose scores are all -inf or NaN still gets an
    id.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    rows = len(logits)
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"logits are {tuple(logits.shape)} {logits.dtype}; give [rows, vocabulary] in float32.")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"The logits of a row are {logits.stride(1)} apart in memory; give contiguous rows.")
    for name in ("temperature", "top_k", "top_p", "min_p", "keys"):
        if getattr(params, name).shape != (rows,):
            raise ValueError(
                f"{name} has shape {tuple(getattr(params, name).shape)}; give one for each of {rows} rows."
            )
    if uses_triton(logits):
        out: torch.Tensor = implementation("sample.gpu", "sample_triton")(logits, params)
        return out
    return sample_reference(logits, params)


def best_of_slice(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, *, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's best score, [S] float64, and its token id, [S] int64; of equal scores the lowest id.

    `logits` [S, V] float32 are those of the ids from `first_id` on. If a row's `temperature` [S] is 0, scores are its logits;
    otherwise they are logit / temperature plus the Gumbel noise of the row's key in `keys` [S] int64 and the id. The id with the
    best score of all slices is therefore the one that `sample` takes without filters. A row whose scores are all -inf or NaN still
    gets an id of the slice.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    rows = len(logits)
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"logits are {tuple(logits.shape)} {logits.dtype}; give [rows, slice] in float32.")
    if temperature.shape != (rows,) or keys.shape != (rows,):
        raise ValueError(
            f"temperature is {tuple(temperature.shape)}, keys {tuple(keys.shape)}; give one for each of {rows} rows."
        )
    if uses_triton(logits) and logits.stride(1) == 1:
        from transom_kernels.sample.gpu import best_of_slice_triton

        return best_of_slice_triton(logits, temperature, keys, first_id)
    return best_of_slice_reference(logits, temperature, keys, first_id)

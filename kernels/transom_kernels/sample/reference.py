"""The specification of `sample`, row by row: filters by sorting, then the largest sum of scaled logit and Gumbel noise.

Noise is counter-based, a function of the row's key and the token id: the random bits of a counter are SplitMix64's finaliser over
`key + counter * GOLDEN`. Token ids form blocks of 64. Counter `-1 - block` gives the least exponential variable of the block and
the id that has it; each other id of the block adds an exponential variable of its own (its counter is the id). Gumbel noise is
`-log` of the exponential variable. Since exponential variables have no memory, the 64 noises are
independent and standard, and the largest of a block is one random number.
"""

from __future__ import annotations

import math

import torch

from transom_kernels.sample.params import NOISE_BLOCK, SampleParams

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK_64 = 2**64 - 1


def sample_reference(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """The specification of `op.sample`."""
    if params.change_row is not None:
        _apply_changes(logits, params)
    return torch.tensor([_sample_row(logits[row], params, row) for row in range(len(logits))], dtype=torch.int64)


def _apply_changes(logits: torch.Tensor, params: SampleParams) -> None:
    changes = (params.change_row, params.change_id, params.change_factor, params.change_minus)
    for row, token, factor, minus in zip(*(part.tolist() for part in changes if part is not None), strict=True):
        value = float(logits[row, token])
        logits[row, token] = (value / factor if value > 0 else value * factor) - minus


def _sample_row(logits: torch.Tensor, params: SampleParams, row: int) -> int:
    temperature = float(params.temperature[row])
    if temperature == 0.0:
        return int(logits.argmax())
    scaled = logits / params.temperature[row]
    best = float(scaled.max())
    least_kept = -math.inf
    top_k, top_p, min_p = int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row])
    if 0 < top_k < len(scaled):
        least_kept = float(scaled.sort(descending=True).values[top_k - 1])
    if top_p < 1.0:
        ordered = scaled[scaled >= least_kept].sort(descending=True).values
        weights = (ordered.double() - best).exp()
        is_kept = weights.cumsum(0) - weights < top_p * weights.sum()
        least_kept = float(ordered[is_kept].min())
    if min_p > 0:
        least_kept = max(least_kept, best + math.log(min_p))
    key = int(params.keys[row])
    scores = [
        (float(value) + gumbel(key, token), -token)
        for token, value in enumerate(scaled.tolist())
        if value >= least_kept
    ]
    return -max(scores)[1]


def gumbel(key: int, token: int) -> float:
    """Standard Gumbel noise of one token id under a row's key."""
    bits = _random_bits(key, -1 - token // NOISE_BLOCK)
    exponential = -math.log(_uniform(bits)) / NOISE_BLOCK
    if token % NOISE_BLOCK != bits % NOISE_BLOCK:
        exponential += -math.log(_uniform(_random_bits(key, token)))
    return -math.log(exponential)


def _random_bits(key: int, counter: int) -> int:
    value = (key + counter * GOLDEN) & MASK_64
    value = ((value ^ (value >> 30)) * MIX_1) & MASK_64
    value = ((value ^ (value >> 27)) * MIX_2) & MASK_64
    return value ^ (value >> 31)


def _uniform(bits: int) -> float:
    return ((bits >> 12) + 0.5) * 2.0**-52

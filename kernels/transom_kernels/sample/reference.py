"""Row by row, by sorting: the specification of `sample`.

Noise is counter-based: SplitMix64's finaliser over `key + counter * GOLDEN`. A block of 64 ids draws its least exponential variable
(counter -1 - block) and the id that has it; every other id adds a draw of its own (counter: the id).
"""

from __future__ import annotations

import math

import torch

from transom_kernels.sample.params import NOISE_BLOCK, SampleParams

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK_64 = 2**64 - 1


def sample_reference(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """See `op.sample`."""
    if params.change_row is not None:
        _change(logits, params)
    return torch.tensor([_one(logits[row], params, row) for row in range(len(logits))], dtype=torch.int64)


def _change(logits: torch.Tensor, params: SampleParams) -> None:
    changes = (params.change_row, params.change_id, params.change_factor, params.change_minus)
    for row, token, factor, minus in zip(*(part.tolist() for part in changes if part is not None), strict=True):
        value = float(logits[row, token])
        logits[row, token] = (value / factor if value > 0 else value * factor) - minus


def _one(logits: torch.Tensor, params: SampleParams, row: int) -> int:
    temperature = float(params.temperature[row])
    if temperature == 0.0:
        return int(logits.argmax())
    tempered = logits / params.temperature[row]
    best = float(tempered.max())
    cut = -math.inf
    top_k, top_p, min_p = int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row])
    if 0 < top_k < len(tempered):
        cut = float(tempered.sort(descending=True).values[top_k - 1])
    if top_p < 1.0:
        ordered = tempered[tempered >= cut].sort(descending=True).values
        weights = (ordered.double() - best).exp()
        inside = weights.cumsum(0) - weights < top_p * weights.sum()
        cut = float(ordered[inside].min())
    if min_p > 0:
        cut = max(cut, best + math.log(min_p))
    key = int(params.keys[row])
    scores = [
        (float(value) + gumbel(key, token), -token) for token, value in enumerate(tempered.tolist()) if value >= cut
    ]
    return -max(scores)[1]


def gumbel(key: int, token: int) -> float:
    """Standard Gumbel noise of one token."""
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

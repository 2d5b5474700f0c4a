"""Computes the rotation frequency of each RoPE pair (transformers' `inv_freq`), for each kind of RoPE scaling.

A token's angle is position x frequency, so a position multiplies the rounding error of its frequency. Frequencies are therefore
computed in float32 and in transformers' order of operations, so that they equal those of transformers. The factor by which YaRN
scales cosine and sine (mscale) is `Rope.attention_factor`, which `RotaryEmbedding` applies.

Legend: R rotated width, D head width.
"""

from __future__ import annotations

import math

import torch

from transom_core.errors import ModelError
from transom_core.model_config.rope import ROPE_KINDS, Rope


def frequencies(rope: Rope, device: torch.device) -> torch.Tensor:
    """Return each pair's radians per token, float32 [R / 2]; for a proportional RoPE [D / 2], with 0 for the pairs beyond R.

    Raises:
        ModelError: the kind of scaling is unknown.
    """
    match rope.kind:
        case "default":
            return _plain(rope, device)
        case "linear":
            return _plain(rope, device) / rope.factor
        case "llama3":
            return _llama3(rope, _plain(rope, device))
        case "yarn":
            return _yarn(rope, device)
        case "proportional":
            return _proportional(rope, device)
    raise ModelError(f"config.json asks for rope scaling {rope.kind!r}; supported: {', '.join(ROPE_KINDS)}.")


def _exponents(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, size, 2, dtype=torch.int64).to(device=device, dtype=torch.float32)


def _plain(rope: Rope, device: torch.device) -> torch.Tensor:
    return 1.0 / (rope.theta ** (_exponents(rope.size, device) / rope.size))


def _proportional(rope: Rope, device: torch.device) -> torch.Tensor:
    rotating = 1.0 / (rope.theta ** (_exponents(rope.size, device) / rope.head_size))
    fixed = rotating.new_zeros(rope.head_size // 2 - len(rotating))
    return torch.cat([rotating, fixed]) / rope.factor


def _llama3(rope: Rope, frequency: torch.Tensor) -> torch.Tensor:
    """Apply Llama 3's scaling: slow pairs rotate `factor` times slower, fast pairs as before, those between are interpolated."""
    length, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / frequency  # tokens per rotation
    slowed = torch.where(wavelength > length / low, frequency / rope.factor, frequency)
    smooth = (length / wavelength - low) / (high - low)  # from 0 (slow pairs) to 1 (fast pairs)
    mixed = (1 - smooth) * slowed / rope.factor + smooth * slowed
    between = (wavelength >= length / high) & (wavelength <= length / low)
    return torch.where(between, mixed, slowed)


def _yarn(rope: Rope, device: torch.device) -> torch.Tensor:
    """Return YaRN's frequencies: pairs that rotate often over the original length are unchanged, slow pairs rotate `factor` times
    slower, and a linear ramp interpolates the pairs between.
    """

    def pair_with_rotations(rotations: float) -> float:
        # theta ** (2 pair / size) = period: the pair, as a real number, that rotates this often over the original length.
        period = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.size * math.log(period) / (2 * math.log(rope.theta))

    low, high = pair_with_rotations(rope.beta_fast), pair_with_rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    pairs = torch.arange(rope.size // 2, dtype=torch.float32, device=device)
    # From 1 (a fast pair keeps its frequency) to 0 (a slow pair); 0.001, as in transformers, if the ramp has no width.
    kept = 1 - ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
    tokens_per_radian = rope.theta ** (_exponents(rope.size, device) / rope.size)
    return 1.0 / (rope.factor * tokens_per_radian) * (1 - kept) + 1.0 / tokens_per_radian * kept

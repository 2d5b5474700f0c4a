"""Rotary embedding (RoPE): the rotation frequency of each pair (transformers' `inv_freq`), for each kind of RoPE scaling, and the
tables of one step, which all layers with the same frequencies share.

A token's angle is position x frequency, so a position multiplies the rounding error of its frequency. Frequencies are therefore
computed in float32 and in transformers' order of operations, so that they equal those of transformers. The factor by which YaRN
scales cosine and sine (mscale) is `Rope.attention_factor`, which `RotaryEmbedding` applies.

Legend: T tokens, R rotated width, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from transom_core.errors import ModelError
from transom_core.model_config.rope import ROPE_KINDS, Rope
from transom_kernels.rotary import rotary_tables


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosine and sine per token, [T, 1, R]; the sine is negated for the first element of each pair.

    The two elements of a pair are R / 2 apart, or neighbours if `interleaved`. `for_sinks` is set in steps with tokens beyond the
    model's trained length: when a query reads sink tokens, it is rotated as if it were at the end of that length. `for_index` are
    the tables of an indexer whose pairs are others.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor
    interleaved: bool = False
    for_sinks: RotaryTables | None = None
    for_index: RotaryTables | None = None


class RotaryEmbedding:
    """Computes rotary tables from frequencies in float32, and casts them to the model's dtype, as transformers does."""

    def __init__(
        self, frequency: torch.Tensor, *, dtype: torch.dtype, scale: float = 1.0, interleaved: bool = False
    ) -> None:
        """`frequency` is [R / 2] float32 in radians per token; `scale` multiplies cosine and sine."""
        signs = torch.ones_like(frequency)
        if interleaved:
            self._frequency_R = frequency.repeat_interleave(2)
            self._sign_R = torch.stack([-signs, signs], dim=1).flatten()
        else:
            self._frequency_R = torch.cat([frequency, frequency])
            self._sign_R = torch.cat([-signs, signs])
        self._dtype, self._scale, self._interleaved = dtype, scale, interleaved

    def __call__(self, positions_T: torch.Tensor, sink_positions_T: torch.Tensor | None = None) -> RotaryTables:
        """Return the tables of these positions, with those of `sink_positions`, if given, for queries that read sink tokens."""
        for_sinks = None if sink_positions_T is None else self(sink_positions_T)
        cos, signed_sin = rotary_tables(positions_T, self._frequency_R, self._sign_R, self._dtype, self._scale)
        return RotaryTables(cos, signed_sin, self._interleaved, for_sinks)


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
        case "longrope":
            tokens_per_radian = rope.theta ** (_exponents(rope.size, device) / rope.size)
            return 1.0 / (torch.tensor(rope.pair_factors, device=device) * tokens_per_radian)
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
    slower, and a linear ramp interpolates the pairs between."""

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

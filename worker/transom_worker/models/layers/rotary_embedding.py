"""Rotary embedding (RoPE): computes the tables of one step, which all layers with the same frequencies share.

Legend: T tokens, R rotated width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.rotary import rotary_tables


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosine and sine per token, [T, 1, R]; the sine is negated for the first element of each pair.

    The two elements of a pair are R / 2 apart, or neighbours if `interleaved`. `for_sinks` is set in steps with tokens beyond the
    model's trained length: when a query reads sink tokens, it is rotated as if it were at the end of that length.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor
    interleaved: bool = False
    for_sinks: RotaryTables | None = None


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

"""Experts' weights as the operator takes them: plain, or MXFP4 as stored.

Legend: E experts, N hidden width, I inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

MX_GROUP = 32  # elements that share a scale
MX_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lowest three bits; the fourth is the sign
MX_BIAS = 127  # of scales, which are exponents


@dataclass(frozen=True, slots=True, kw_only=True)
class MxTensor:
    """MXFP4 (OCP microscaling): two elements a byte, the first in the low half, and an exponent for every 32."""

    blocks: torch.Tensor  # [E, rows, columns / 2] uint8
    scales: torch.Tensor  # [E, rows, columns / 32] uint8

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the elements."""
        experts, rows, half = self.blocks.shape
        return experts, rows, 2 * half

    def dequantised(self) -> torch.Tensor:
        """[E, rows, columns] float32."""
        table = torch.tensor([*MX_VALUES, *(-value for value in MX_VALUES)], device=self.blocks.device)
        pairs = torch.stack([table[(self.blocks & 15).long()], table[(self.blocks >> 4).long()]], dim=-1)
        scale = torch.ldexp(torch.ones(self.scales.shape, device=table.device), self.scales.to(torch.int32) - MX_BIAS)
        elements = pairs.reshape(*self.scales.shape, MX_GROUP) * scale[..., None]
        return elements.flatten(-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """All experts of a layer, `gate_up` [E, 2I, N] and `down` [E, N, I], both plain or both MXFP4; biases [E, 2I] and [E, N].

    Gates come before ups, or, if `interleaved`, each gate is followed by its up.
    """

    gate_up: torch.Tensor | MxTensor
    down: torch.Tensor | MxTensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule:
    """`activation(gate) * (up + up_offset)`; silu is `gate * sigmoid(gain * gate)`. `limit` keeps gates below it and ups within."""

    activation: Literal["silu", "gelu_tanh"] = "silu"
    gain: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

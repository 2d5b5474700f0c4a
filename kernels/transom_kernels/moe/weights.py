"""The weights of a layer's experts as `moe` takes them: plain tensors, or MXFP4 as stored in checkpoints.

Legend: E experts, N hidden width, I inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

MX_GROUP = 32  # elements that share a scale
MX_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # lower three bits of fp4 -> magnitude; the fourth bit is the sign
MX_BIAS = 127  # a scale s stands for 2 ** (s - MX_BIAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MxTensor:
    """A matrix per expert in MXFP4 (OCP microscaling): two fp4 numbers per byte, the first in the low half, and one scale per 32.

    An element is its fp4 number times 2 ** (scale - 127).
    """

    blocks: torch.Tensor  # [E, rows, columns / 2] uint8
    scales: torch.Tensor  # [E, rows, columns / 32] uint8

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, rows and columns of the dequantised tensor."""
        experts, rows, half = self.blocks.shape
        return experts, rows, 2 * half

    def dequantised(self) -> torch.Tensor:
        """Return the elements, [E, rows, columns] float32."""
        table = torch.tensor([*MX_VALUES, *(-value for value in MX_VALUES)], device=self.blocks.device)
        pairs = torch.stack([table[(self.blocks & 15).long()], table[(self.blocks >> 4).long()]], dim=-1)
        scale = torch.ldexp(torch.ones(self.scales.shape, device=table.device), self.scales.to(torch.int32) - MX_BIAS)
        elements = pairs.reshape(*self.scales.shape, MX_GROUP) * scale[..., None]
        return elements.flatten(-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """The weights of all experts of a layer: `gate_up` [E, 2 I, N] and `down` [E, N, I], both plain or both MXFP4.

    Biases are [E, 2 I] and [E, N]. The first I rows of `gate_up` are gates and the others ups; if `interleaved`, rows alternate.
    """

    gate_up: torch.Tensor | MxTensor
    down: torch.Tensor | MxTensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule:
    """The gated activation of an expert: `activation(gate) * (up + up_offset)`, where silu is `gate * sigmoid(gain * gate)`.

    `limit` clamps gates to at most `limit`, and ups to [-limit, limit].
    """

    activation: Literal["silu", "gelu_tanh"] = "silu"
    gain: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

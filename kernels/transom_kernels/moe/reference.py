"""The specification of `moe`: one token and one expert after the other, in float32.

Legend: T tokens, N hidden width, I inner width, E experts, K experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from transom_kernels.moe.weights import ExpertTensors, GateRule, MxTensor


def moe_reference(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    tensors: ExpertTensors,
    rule: GateRule,
    *,
    scales_input: bool = False,
) -> torch.Tensor:
    """The contract is that of `op.moe`."""
    gate_up, down = _wide(tensors.gate_up), _wide(tensors.down)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for token in range(len(x)):
        for expert, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            row = x[token].float() * (weight if scales_input else 1.0)
            inner = gate_up[expert] @ row
            if tensors.gate_up_bias is not None:
                inner = inner + tensors.gate_up_bias[expert].float()
            gate, up = (inner[0::2], inner[1::2]) if tensors.interleaved else inner.chunk(2)
            result = down[expert] @ gated(gate, up, rule)
            if tensors.down_bias is not None:
                result = result + tensors.down_bias[expert].float()
            out[token] += result * (1.0 if scales_input else weight)
    return out.to(x.dtype)


def gated(gate: torch.Tensor, up: torch.Tensor, rule: GateRule) -> torch.Tensor:
    """The gated activation of `GateRule`: activation(gate) * (up + up_offset), with clamps."""
    if rule.limit is not None:
        gate, up = gate.clamp(max=rule.limit), up.clamp(-rule.limit, rule.limit)
    active = gate * torch.sigmoid(rule.gain * gate) if rule.activation == "silu" else F.gelu(gate, approximate="tanh")
    return active * (up + rule.up_offset)


def _wide(weight: torch.Tensor | MxTensor) -> torch.Tensor:
    """The weights in float32."""
    return weight.dequantised() if isinstance(weight, MxTensor) else weight.float()

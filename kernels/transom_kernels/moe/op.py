"""The operator `moe`: passes each token through its chosen experts and sums their weighted results.

Legend: T tokens, N hidden width, I inner width, E experts, K experts per token.
"""

import torch
import torch.nn.functional as F

from transom_kernels.launch import implementation, uses_triton
from transom_kernels.moe.cpu import moe_cpu
from transom_kernels.moe.weights import ExpertTensors, GateRule, GpuMatrix, Matrix, MxTensor, PackedExperts


def moe(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    tensors: ExpertTensors | PackedExperts,
    rule: GateRule,
    *,
    scales_input: bool = False,
) -> torch.Tensor:
    """Return `sum_k weights[t, k] * expert(experts[t, k])(x[t])`, [T, N] in the dtype of `x`; summed in the order of `k`.

    `x` is [T, N], `experts` [T, K] integers, `weights` [T, K] float32. With `scales_input` a weight multiplies the expert's input
    instead of its result. An expert is `down @ gated(gate_up @ x + bias) + bias`; see `ExpertTensors` and `GateRule`. CPU kernels
    compute `PackedExperts`; with them a token's result does not depend on the other tokens.

    Raises:
        ValueError: shapes or dtypes do not fit, tensors are not contiguous, or MXFP4 widths are not multiples of 32.
    """
    if isinstance(tensors, PackedExperts):
        _check_packed(x, experts, weights, tensors, rule)
        return moe_cpu(x, experts, weights, tensors, rule, scales_input=scales_input)
    _check_routes(x, experts, weights)
    kind = (x.shape[1], is_triton := uses_triton(x))
    if kind not in tensors.prepared or not x.is_contiguous():
        _check(x, tensors, rule)
        tensors.prepared[kind] = True
    if is_triton:
        out: torch.Tensor = implementation("moe.gpu", "moe_triton")(
            x, experts, weights, tensors, rule, scales_input=scales_input
        )
        return out
    return moe_reference(x, experts, weights, tensors, rule, scales_input=scales_input)


def moe_reference(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    tensors: ExpertTensors,
    rule: GateRule,
    *,
    scales_input: bool = False,
) -> torch.Tensor:
    """Compute `moe` in torch, one token and one expert after the other, in float32: the specification."""
    gate_up, down = _wide(tensors.gate_up), _wide(tensors.down)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for token in range(len(x)):
        for expert, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            row = x[token].float() * (weight if scales_input else 1.0)
            inner = gate_up[expert] @ row
            if tensors.gate_up_bias is not None:
                inner = inner + tensors.gate_up_bias[expert].float()
            if rule.has_gates:
                gate, up = (inner[0::2], inner[1::2]) if tensors.interleaved else inner.chunk(2)
                inner = gated(gate, up, rule)
            else:
                inner = inner.relu().square()
            result = down[expert] @ inner
            if tensors.down_bias is not None:
                result = result + tensors.down_bias[expert].float()
            out[token] += result * (1.0 if scales_input else weight)
    return out.to(x.dtype)


def gated(gate: torch.Tensor, up: torch.Tensor, rule: GateRule) -> torch.Tensor:
    """Return the gated activation of `GateRule`: activation(gate) * (up + up_offset), with gate and up clamped to the limits."""
    if rule.limits is not None:
        gate, up = gate.clamp(max=rule.limits[0]), up.clamp(-rule.limits[1], rule.limits[1])
    active = gate * torch.sigmoid(rule.gain * gate) if rule.activation == "silu" else F.gelu(gate, approximate="tanh")
    return active * (up + rule.up_offset)


def _wide(weight: Matrix) -> torch.Tensor:
    """Return the weights in float32."""
    assert not isinstance(weight, GpuMatrix)
    return weight.dequantised() if isinstance(weight, MxTensor) else weight.float()


def _check(x: torch.Tensor, tensors: ExpertTensors, rule: GateRule) -> None:
    """Raise ValueError unless the experts' weights fit together, and `x` and the rule fit them."""
    (num_experts, rows, width), parts = tensors.gate_up.shape, 2 if rule.has_gates else 1
    if tuple(tensors.down.shape) != (num_experts, x.shape[1], rows // parts) or width != x.shape[1] or rows % parts:
        raise ValueError(
            f"x {tuple(x.shape)} does not fit experts {tuple(tensors.gate_up.shape)} and {tuple(tensors.down.shape)}: "
            f"give [E, {parts}I, N] and [E, N, I]."
        )
    plain = [weight for weight in (tensors.gate_up, tensors.down) if isinstance(weight, torch.Tensor)]
    if not all(weight.is_contiguous() for weight in (x, *plain)):
        raise ValueError("x and the experts' weights must be contiguous in memory; call contiguous() first.")
    quantised = [weight for weight in (tensors.gate_up, tensors.down) if not isinstance(weight, torch.Tensor)]
    if any(isinstance(weight, GpuMatrix) != uses_triton(x) for weight in quantised):
        raise ValueError("Quantised weights must be arranged by `for_gpu` where Triton computes, and nowhere else.")
    if any(
        weight.shape[2] % 32 or weight.scales.shape[2] * 32 != weight.shape[2]
        for weight in quantised
        if isinstance(weight, MxTensor)
    ):
        raise ValueError(
            f"MXFP4 weights {[weight.shape for weight in quantised]} must have a scale for every 32 columns."
        )


def _check_packed(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, packed: PackedExperts, rule: GateRule
) -> None:
    """Raise ValueError for arguments that do not fit."""
    if packed.has_gates != rule.has_gates:
        raise ValueError(
            f"The activation {rule.activation} does not fit packed experts: has_gates is {packed.has_gates}."
        )
    dtypes = {packed.gate_up.dtype, packed.down.dtype} - {None} or {torch.float32, torch.bfloat16}
    if x.dim() != 2 or x.shape[1] != packed.width or x.dtype not in dtypes or x.stride(1) != 1:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} does not fit packed experts: give [T, {packed.width}] in one of {dtypes}."
        )
    _check_routes(x, experts, weights)


def _check_routes(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
    """Raise ValueError unless there are K experts and weights for each token."""
    if experts.shape != weights.shape or experts.shape[0] != x.shape[0]:
        raise ValueError(
            f"{len(x)} tokens need experts and weights [T, K], not {tuple(experts.shape)} and {tuple(weights.shape)}."
        )

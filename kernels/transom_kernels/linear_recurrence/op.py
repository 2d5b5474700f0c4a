"""The operators of layers with a recurrent state: `linear_recurrence`, `causal_convolution` and `gated_rms_norm`.

`linear_recurrence` is a causal convolution over each channel's last L tokens with silu, then the recurrence of each head. Its state
S is a matrix [D, Dv]; a token's query q, key k and value v are parts of the convolution's result.

    step = softplus(step_size + step_bias)               decay = exp(-rate * step)

    gated delta rule (with `strength`)                   Mamba
    q, k = q / |q| / sqrt(D), k / |k|
    S = decay * S                                        S = decay * S
    S = S + k (sigmoid(strength) * (v - S^T k))^T        S = S + k (step * v)^T
    out = S^T q                                          out = S^T q + skip * v

In Kimi Linear's delta rule (KDA) each row of S has a step and a decay of its own; in Ling 3's the decay has a bound:
exp(-most_decay * sigmoid(rate * (step_size + step_bias))). In Mamba-1 each column has a step, each number of
S a decay, and q and k come from projections of the convolution's result: so the convolution is an operator of its own there.

The cache keeps, in a block for each sequence, all heads' states in float32, and the convolution's inputs of the last L - 1 tokens
as given. A result depends on its sequence alone. How a prompt is cut into steps changes nothing but rounding, and on CPUs and in
float32 nothing at all.

Legend: T tokens, H heads, D key width, Dv value width, L tokens of the convolution's kernel, N row width.
"""

from collections.abc import Callable

import torch

from transom_kernels.cpu.launching import DTYPES
from transom_kernels.cpu.recording import refuse_recording
from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton
from transom_kernels.linear_recurrence.cpu.gated_norm import gated_rms_norm_cpu
from transom_kernels.linear_recurrence.cpu.recurrence import (
    causal_convolution_cpu,
    convolution_fits_cpu_kernel,
    fits_cpu_kernels,
    linear_recurrence_cpu,
)
from transom_kernels.linear_recurrence.inputs import Convolution, GatedNorm, RecurrenceInputs, StateBatch
from transom_kernels.linear_recurrence.reference import (
    causal_convolution_reference,
    gated_rms_norm_reference,
    linear_recurrence_reference,
)


def linear_recurrence(inputs: RecurrenceInputs) -> torch.Tensor:
    """Return the heads' results, [T, H * Dv] in the dtype of `projected`, and write the states after each sequence's last token.

    All is computed in float32; the convolution's result is rounded to the dtype of `projected`. Results of tokens that pad a step
    are zeros.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    inputs.check()
    if uses_triton(inputs.projected):
        out: torch.Tensor = implementation("linear_recurrence.gpu", "linear_recurrence_triton")(inputs)
        return out
    if uses_cpu_kernels(inputs.projected) and fits_cpu_kernels(inputs):
        return linear_recurrence_cpu(inputs)
    refuse_recording("torch reads blocks in Python")
    return linear_recurrence_reference(inputs)


def causal_convolution(projected: torch.Tensor, convolution: Convolution, batch: StateBatch) -> torch.Tensor:
    """Return silu(convolution) of `projected` [T, C], in its dtype, and write the rows after each sequence's last token.

    Results of tokens that pad a step mean nothing.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    convolution.check(projected)
    if uses_triton(projected):
        out: torch.Tensor = implementation("linear_recurrence.gpu", "causal_convolution_triton")(
            projected, convolution, batch
        )
        return out
    if uses_cpu_kernels(projected) and convolution_fits_cpu_kernel(projected, convolution):
        return causal_convolution_cpu(projected, convolution, batch)
    refuse_recording("torch reads blocks in Python")
    return causal_convolution_reference(projected, convolution, batch)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    group: int | None = None,
    gates_first: bool = False,
    by_sigmoid: bool = False,
) -> torch.Tensor:
    """Return rms_norm(x) * weight * silu(gate), [T, N] in the dtype of `x`, each `group` neighbours normed alone (default: N).

    With `gates_first` the norm is of x * silu(gate). A weight of [group] numbers serves all groups; without a weight there is no
    norm, only x * silu(gate), and `gate` may be [T, N / group], a number for each group. With `by_sigmoid` the factor is
    sigmoid(gate) instead. All is computed in float32 and rounded once. `x` and `gate` have contiguous rows.

    Raises:
        ValueError: shapes do not fit.
    """
    width = x.shape[-1]
    size = width if group is None else group
    gates = (width,) if weight is not None else (width, width // size)
    fits = gate.shape[:-1] == x.shape[:-1] and gate.shape[-1] in gates and not width % size
    if not fits or (weight is not None and weight.numel() not in (size, width)):
        shapes = tuple(gate.shape), None if weight is None else tuple(weight.shape)
        raise ValueError(f"gate and weight {shapes} and groups of {size} do not fit x {tuple(x.shape)}.")
    norm = GatedNorm(x, gate, weight, eps, size, gates_first, by_sigmoid)
    if uses_triton(x):
        by_triton: Callable[[GatedNorm], torch.Tensor] = implementation(
            "linear_recurrence.gpu", "gated_rms_norm_triton"
        )
        return by_triton(norm)
    if uses_cpu_kernels(x) and x.dtype in DTYPES and x.stride(1) == gate.stride(1) == 1:
        return gated_rms_norm_cpu(norm)
    return gated_rms_norm_reference(norm)

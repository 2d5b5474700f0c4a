"""The operator `short_convolution`: the gated causal convolution of LFM2, over each channel's last few tokens.

    row[p] = gate_in * x                                     of the token at position p, in the cache's dtype
    out[p] = gate_out * (bias + sum_d weight[L - 1 - d] * row[p - d])     over the distances d = 0 to L - 1

A token's row is written to the KV cache at the token's position. Rows of the step's own tokens are computed from its inputs, and
rows of tokens before the step are read from the cache; both are rounded alike, so a token's result does not depend on where steps
begin. A row before the first token, or below the sequence's `attend_from`, counts as zero.

CPUs compute with a compiled kernel (`cpu.py`), CUDA devices with Triton (`gpu.py`). Where neither is available, torch computes
(`reference.py`, the specification of both).

Legend: T tokens, L tokens of the convolution's kernel, C channels of this rank.
"""

import torch

from transom_kernels.cpu.recording import refuse_recording
from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton
from transom_kernels.short_convolution.cpu import fits_cpu_kernel, short_convolution_cpu
from transom_kernels.short_convolution.reference import ConvolutionInputs, short_convolution_reference


def short_convolution(inputs: ConvolutionInputs) -> torch.Tensor:
    """Write the tokens' rows to the cache and return the gated convolution, [T, C] in the dtype of the inputs.

    All steps compute in float32; the sum is in the order of the tokens.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    inputs.check()
    if uses_triton(inputs.projected):
        out: torch.Tensor = implementation("short_convolution.gpu", "short_convolution_triton")(inputs)
        return out
    if uses_cpu_kernels(inputs.projected) and fits_cpu_kernel(inputs):
        return short_convolution_cpu(inputs)
    refuse_recording("torch reads slots in Python")
    return short_convolution_reference(inputs)

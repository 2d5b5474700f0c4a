"""The operator `add_lora_`: it adds the low-rank change of each row's adapter to the output of a projection.

    y[m, n] += scales[s, p] * sum_r b[s, r, n] * (sum_k a[s, p * R + r, k] * x[m, k])

Here s = slots[m] is the slot of row m's adapter, and p is the part of the projection that has column n: for queries, keys and
values of one fused projection, P is 3. Source: Hu et al. 2021 (LoRA); the names A, B and scale are those of PEFT.

All sums are in float32, the product of A and x is kept in float32, and the result is rounded once to the dtype of y. A row's result
does not depend on other rows.

CPUs compute with compiled kernels (`cpu.py`), CUDA devices with Triton (`gpu.py`), by two launches each. Where neither is
available, torch computes (`reference.py`, the specification of both).

Legend: M rows, K input width, N output width of all parts, S slots, P parts, R the largest rank.
"""

import torch

from transom_kernels.cpu.recording import refuse_recording
from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton
from transom_kernels.lora.cpu import add_lora_cpu_, fits_cpu_kernel
from transom_kernels.lora.reference import LoraWeights, add_lora_reference_


def add_lora_(y_MN: torch.Tensor, x_MK: torch.Tensor, slots_M: torch.Tensor, weights: LoraWeights) -> None:
    """Add the change of each row's adapter to `y` [M, N] in place, from `x` [M, K], the input of the projection.

    `slots` [M] are int32, from -1 to S - 1; rows with -1 (no adapter) are not changed. Rows of x and of y may lie any stride apart.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    weights.check(y_MN, x_MK, slots_M)
    if uses_triton(x_MK):
        implementation("lora.gpu", "add_lora_triton_")(y_MN, x_MK, slots_M, weights)
        return
    if uses_cpu_kernels(x_MK) and fits_cpu_kernel(y_MN, x_MK):
        add_lora_cpu_(y_MN, x_MK, slots_M, weights)
        return
    refuse_recording("torch reads the rows' slots in Python")
    add_lora_reference_(y_MN, x_MK, slots_M, weights)

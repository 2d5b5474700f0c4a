"""Sampling: logits to one token id per row.

op, params                  the operator, and its arguments
reference                   the operator in torch: the specification, and the fallback; defines the noise
cpu, cpu_kernel, cpu_noise  CPUs: launches, the kernel, and the noise in LLVM's code
table                       the parameters of many sequences in memory, as the CPU kernel reads them
gpu, sample_rows            GPUs: launches with the pass over all logits, and the kernel that samples a row from its summary
gumbel_max, gumbel_noise    functions of that kernel
"""

from transom_kernels.sample.op import best_of_slice, sample
from transom_kernels.sample.params import SampleParams

__all__ = ["SampleParams", "best_of_slice", "sample"]

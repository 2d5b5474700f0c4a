"""Sampling: picks one token id for each row of logits.

op                          the operators
reference                   their arguments, and the operators in torch: the specification, and the fallback; defines the noise
cpu, cpu_kernel, cpu_noise  CPUs: launches, the kernel, and the noise as LLVM code
table                       the parameters of many sequences, in memory that the CPU kernel reads
gpu, sample_rows            GPUs: launches and the pass over all logits, and the kernel that samples a row from its summary
gumbel_max                  functions of that kernel
"""

from transom_kernels.sample.op import best_of_slice, sample
from transom_kernels.sample.reference import SampleParams

__all__ = ["SampleParams", "best_of_slice", "sample"]

"""MoE (mixture of experts) layers: each token passes through the experts that its router chose.

op                            the operator with its specification
weights                       the experts' tensors as checkpoints have them, and as CPU kernels read them
cpu, cpu_kernel, cpu_product  CPUs: launches, the kernels, and the inner product of rows and a panel of weights
gpu, kernel, row_blocks       GPUs: launches, the grouped matmuls, and the pairs of token and expert sorted by expert
gpu_weights, widening         GPUs: quantised weights as the grouped matmuls read them, and what they do with them
"""

from transom_kernels.moe.gpu_weights import for_gpu
from transom_kernels.moe.op import moe
from transom_kernels.moe.weights import ExpertTensors, GateRule, MxTensor, PackedExperts, pack_experts

__all__ = ["ExpertTensors", "GateRule", "MxTensor", "PackedExperts", "for_gpu", "moe", "pack_experts"]

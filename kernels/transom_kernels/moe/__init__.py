"""MoE layers: each token through the experts that it chose."""

from transom_kernels.moe.op import moe
from transom_kernels.moe.packed import PackedExperts, pack_experts
from transom_kernels.moe.weights import ExpertTensors, GateRule, MxTensor

__all__ = ["ExpertTensors", "GateRule", "MxTensor", "PackedExperts", "moe", "pack_experts"]

"""The factor of queries by their position (Llama 4's layers without RoPE)."""

from transom_kernels.position_scale.op import position_scale

__all__ = ["position_scale"]

"""The factor by which Llama 4's layers without RoPE multiply queries, depending on the position."""

from transom_kernels.position_scale.op import position_scale

__all__ = ["position_scale"]

"""Operators that write a step's keys and values into the paged KV cache, unchanged or after norms and rotation (RoPE)."""

from transom_kernels.kv_write.op import kv_write, prepare_qkv
from transom_kernels.kv_write.reference import Preparation, QkvInputs

__all__ = ["Preparation", "QkvInputs", "kv_write", "prepare_qkv"]

"""Writing a step's keys and values into the paged cache."""

from transom_kernels.kv_write.op import kv_write

__all__ = ["kv_write"]

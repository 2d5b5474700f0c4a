"""Copies of whole KV cache blocks inside one KV cache group's memory, and between two memories such as a GPU's and the host's."""

from transom_kernels.block_copy.op import block_copy, block_copy_between

__all__ = ["block_copy", "block_copy_between"]

"""Copies of whole blocks inside one group's part of the slab."""

from transom_kernels.block_copy.op import block_copy

__all__ = ["block_copy"]

"""Copies of whole KV cache blocks inside one KV cache group's memory."""

from transom_kernels.block_copy.op import block_copy

__all__ = ["block_copy"]

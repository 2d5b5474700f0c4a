"""Attention of new queries over a group's paged KV cache."""

from transom_kernels.paged_attention.op import paged_attention

__all__ = ["paged_attention"]

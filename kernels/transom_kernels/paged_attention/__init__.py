"""Attention of new queries over the paged KV cache of one KV cache group."""

from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.op import paged_attention
from transom_kernels.paged_attention.rule import MaskRule

__all__ = ["MaskRule", "PagedInputs", "paged_attention"]

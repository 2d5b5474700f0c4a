"""Attention of new queries over a group's paged KV cache."""

from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.op import paged_attention
from transom_kernels.paged_attention.rule import MaskRule

__all__ = ["MaskRule", "PagedInputs", "paged_attention"]

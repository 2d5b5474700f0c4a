"""Latent attention over chosen rows (DeepSeek V3.2 and V4), the pooling of V4's entries, and the indexers that choose."""

from transom_kernels.latent_attention.op import latent_attention, pool_rows, select_entries, select_rows
from transom_kernels.latent_attention.reference import LatentInputs

__all__ = ["LatentInputs", "latent_attention", "pool_rows", "select_entries", "select_rows"]

"""DeepSeek V4's latent attention over a window and compressed entries, the pooling that makes entries, and their indexer."""

from transom_kernels.latent_attention.op import latent_attention, pool_rows, select_entries
from transom_kernels.latent_attention.reference import LatentInputs

__all__ = ["LatentInputs", "latent_attention", "pool_rows", "select_entries"]

"""DeepSeek V4's latent attention over a window and compressed entries, the pooling that makes entries, and the indexer."""

from transom_kernels.latent_attention.op import latent_attention, pool_rows, select_entries
from transom_kernels.latent_attention.rows import read_rows, write_rows

__all__ = ["latent_attention", "pool_rows", "read_rows", "select_entries", "write_rows"]

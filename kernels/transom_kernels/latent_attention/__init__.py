"""Attention over a window of latent rows and compressed entries, and what makes and chooses the entries."""

from transom_kernels.latent_attention.compress import pool_rows
from transom_kernels.latent_attention.index import select_entries
from transom_kernels.latent_attention.op import latent_attention
from transom_kernels.latent_attention.rows import read_rows, write_rows

__all__ = ["latent_attention", "pool_rows", "read_rows", "select_entries", "write_rows"]

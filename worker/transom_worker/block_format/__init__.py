"""KV blocks as bytes: cuts and joins blocks between workers with another number of ranks or another number format. No torch."""

from transom_worker.block_format.convert import KvShares, convert_blocks

__all__ = ["KvShares", "convert_blocks"]

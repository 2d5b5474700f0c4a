"""Attention of new queries over a group's paged KV cache."""

"""Paged attention by compiled CPU kernels."""

"""Paged attention by Triton kernels."""

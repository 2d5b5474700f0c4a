"""Attention of rows with a KV policy by Triton kernels."""

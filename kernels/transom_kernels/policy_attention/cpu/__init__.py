"""Attention of rows with a KV policy by compiled CPU kernels."""

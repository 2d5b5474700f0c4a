"""Benchmarks that are commands of `transom bench`."""

"""Checks and measurements on a GPU, each job in a child process (`benchmarks/gpu.sh` runs them)."""

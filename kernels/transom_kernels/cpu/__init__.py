"""Kernels for CPUs: numba functions compiled to object code, run by a pool of threads, alone or as a recorded program."""

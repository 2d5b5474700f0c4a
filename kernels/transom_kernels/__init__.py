"""Operators on torch tensors, one folder each: `op.py` (contract, specification), `cpu.py` and `gpu.py` (launches and kernels)."""

"""Operators on torch tensors, a folder or a file each: `op.py` has the contract, `cpu.py` and `gpu.py` launches and kernels."""

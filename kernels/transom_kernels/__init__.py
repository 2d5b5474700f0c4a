"""Operators on torch tensors, one folder each: `op.py` (contract), `reference.py` (specification), `kernel.py` and `gpu.py`."""

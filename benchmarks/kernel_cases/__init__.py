"""The cases that `benchmarks/kernels.py` measures, one or two operators per file; each file has `cases(scale)`."""

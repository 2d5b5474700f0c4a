"""What `benchmarks/kernels.py` measures, an operator or two a file; each file gives `cases(scale)`."""

"""Parts of `benchmarks/soak.py`: traffic, disturbances, and what is checked while and after they run."""

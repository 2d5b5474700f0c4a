"""The runtime of CPU kernels: compiles Python functions to machine code; runs them on a pool of threads, alone or as programs."""

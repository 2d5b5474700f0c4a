"""The host: cores for threads, waiting threads of OpenMP, memory that is left."""

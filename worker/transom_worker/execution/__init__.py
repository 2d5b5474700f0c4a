"""Executes the scheduler's plans: executors, the model runner of a rank, block copies, CUDA graphs, and warm-up."""

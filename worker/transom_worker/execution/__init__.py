"""Plan to tensors: runner, executor, block copies."""

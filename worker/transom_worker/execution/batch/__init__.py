"""Makes the inputs of one step: block tables, sequences, numpy arrays, and the batch of tensors for a forward pass."""

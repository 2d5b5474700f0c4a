"""The tensors of one step: block tables, sequences, the cache's slab, and the batch for a forward pass."""

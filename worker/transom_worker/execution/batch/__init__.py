"""The inputs of one step: block tables, sequences, the slab (the memory of the KV pool), and the batch for a forward pass."""

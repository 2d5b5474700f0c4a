"""The KV cache of one worker: which sequence has which block, what is cached, and what is evicted. Integers only; no tensors."""

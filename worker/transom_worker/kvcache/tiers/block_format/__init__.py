"""KV blocks as bytes: cuts and joins blocks between workers with different numbers of tensor-parallel ranks. No torch."""

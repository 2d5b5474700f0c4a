"""KV blocks as bytes: cuts and joins blocks between workers with another number of ranks. No torch."""

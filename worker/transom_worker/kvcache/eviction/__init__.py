"""Eviction: checkpoints, what the loss of a prefix would cost, and which one goes first."""

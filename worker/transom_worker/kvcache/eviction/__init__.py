"""Eviction: places checkpoints, estimates what evicting a prefix would cost, and chooses which one is evicted first."""

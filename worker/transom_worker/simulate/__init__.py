"""Replays request traces through the real scheduler and KV cache, without a model and without tensors."""

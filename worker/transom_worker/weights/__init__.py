"""Checkpoints to tensors: safetensors and GGUF."""

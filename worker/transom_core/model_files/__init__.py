"""Finds a model's files, its config and its GGUF header by the model's name, without torch."""

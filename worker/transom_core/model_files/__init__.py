"""From a model's name to its files, its config and its GGUF header, without torch."""

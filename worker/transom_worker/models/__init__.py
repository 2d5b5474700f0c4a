"""A model family a file, over shared layers."""
